"""Findings and reports as text for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pagewick.doctor.findings import Finding, format_memory
from pagewick.doctor.model import ModelReport
from pagewick.doctor.plan import MAX_NUM_SEQS, Plan
from pagewick.doctor.shape import ModelShape
from pagewick.weights.progress import format_bytes

Style = Callable[[str, str], str]
"""(text, level) -> the text as the terminal is to show it."""

_SHOWN_TENSOR_PARALLEL = 64


def plain(text: str, level: str) -> str:
    """No style."""
    return text


def machine_text(findings: Sequence[Finding], style: Style = plain) -> str:
    """A line for each finding, what to do below it, and a last line that says how it is."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        level = style(finding.level.ljust(7), finding.level)
        lines.append(f"{level}  {finding.subject.ljust(width)}  {finding.text}")
        if finding.fix:
            lines.append(f"{' ' * (width + 11)}-> {finding.fix}")
    count = sum(finding.level == "problem" for finding in findings)
    lines += ["", f"{count} problem{'s' * (count != 1)}" if count else "Pagewick can run on this machine."]
    return "\n".join(lines)


def machine_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings, and whether none of them is a problem."""
    return {
        "ok": not any(finding.level == "problem" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def model_text(report: ModelReport, style: Style = plain) -> str:
    """What is known of a model, most important first."""
    lines = [*_what_it_is(report, style), "", *_formats(report)]
    if report.plan is not None:
        lines += ["", *_memory(report.plan), "", *_contexts(report.plan, report)]
    if report.problem:
        lines += ["", f"{style('problem', 'problem')}  {report.problem}"]
        lines += [f"         -> {report.fix}"] if report.fix else []
    if report.command:
        lines += ["", "Start it:", f"  {report.command}"]
    return "\n".join(lines)


def model_json(report: ModelReport) -> dict[str, Any]:
    """The same for programs; sizes in bytes, lengths in tokens."""
    checkpoint, shape, plan = report.checkpoint, report.checkpoint.shape, report.plan
    described = {name: value for name, value in asdict(shape).items() if name not in ("windows", "other_cache")}
    return {
        "ok": not report.problem,
        "model": checkpoint.model,
        "where": checkpoint.where,
        "is_downloaded": checkpoint.is_downloaded,
        "is_only_described": checkpoint.is_only_described,
        "runs": report.verdict.runs,
        "nearest_supported": report.verdict.nearest,
        "problem": report.problem,
        "fix": report.fix,
        **described,
        "num_parameters": report.num_parameters,
        "stored_bytes": checkpoint.num_bytes,
        "weight_bytes": {stored.name: stored.num_bytes for stored in report.formats},
        "loadable": sorted(report.loadable),
        "kv_bytes_per_token": dict(report.kv_bytes),
        "plan": None if plan is None else _plan_json(plan),
        "command": report.command,
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    found = asdict(plan)
    found["needed"], found["short_by"] = plan.needed, plan.short_by
    return found


def _what_it_is(report: ModelReport, style: Style) -> list[str]:
    checkpoint, shape = report.checkpoint, report.checkpoint.shape
    runs = style("Pagewick runs it", "ok") if report.verdict.runs else style("Pagewick does not run it", "problem")
    there = "" if checkpoint.is_downloaded else " (not downloaded)"
    there = " (no weights; their sizes follow from config.json)" if checkpoint.is_only_described else there
    dtypes = Counter[str]()
    for tensor in checkpoint.tensors:
        dtypes[tensor.dtype] += tensor.num_bytes
    stored = ", ".join(dtype for dtype, _ in dtypes.most_common(3))
    num_all, num_linear = format_count(report.num_parameters), format_count(report.num_linear)
    return [
        f"{checkpoint.model}: {shape.architecture}; {runs}",
        f"  {checkpoint.where}{there}",
        f"  {num_all} parameters, {num_linear} of them in linear layers; stored as {stored}, "
        f"{format_bytes(checkpoint.num_bytes)}",
        f"  {describe_shape(shape)}",
        f"  context {shape.max_position_embeddings:,} tokens",
    ]


def describe_shape(shape: ModelShape) -> str:
    """Layers, heads and sizes, in a line."""
    kept = f"{shape.num_kv_heads} KV heads of {shape.head_dim}"
    if shape.kv_lora_rank:
        kept = f"one latent of {shape.kv_lora_rank} + {shape.qk_rope_head_dim}"
    return (
        f"{shape.num_layers} layers, {shape.num_heads} heads, {kept}, hidden size {shape.hidden_size:,}, "
        f"vocabulary {shape.vocab_size:,}"
    )


def _formats(report: ModelReport) -> list[str]:
    width = max(len(stored.name) for stored in report.formats)
    lines = ["Weights by format:"]
    for stored in report.formats:
        loads = "" if stored.name in report.loadable else "  (cannot be loaded yet)"
        lines.append(f"  {stored.name.ljust(width)}  {format_bytes(stored.num_bytes):>8}{loads}")
    return lines


def _memory(plan: Plan) -> list[str]:
    each = "each GPU" if plan.device.kind == "cuda" and plan.tensor_parallel_size > 1 else "this machine"
    parts = [("weights", plan.weights), ("runtime", plan.runtime), ("activations (estimated)", plan.activations)]
    parts += [("kept free", plan.reserve)] if plan.reserve else []
    shown = " + ".join(f"{format_memory(size)} {name}" for name, size in parts)
    sizes = ", ".join(str(size) for size in plan.tensor_parallel_sizes if size <= _SHOWN_TENSOR_PARALLEL)
    return [
        f"Memory of {each} ({plan.device.kind}, {format_memory(plan.device.memory)} free; weights in {plan.dtype}):",
        f"  needed: {shown} = {format_memory(plan.needed)}",
        f"  left for the KV cache: {format_memory(plan.kv_most)}; Pagewick takes {format_memory(plan.kv_default)} "
        "unless --kv-cache-memory says more",
        f"  tensor parallel sizes that divide the heads: {sizes}; planned with {plan.tensor_parallel_size}",
    ]


def _contexts(plan: Plan, report: ModelReport) -> list[str]:
    per_token = ", ".join(f"{format_memory(size)} in {dtype}" for dtype, size in report.kv_bytes.items())
    rows = [("tokens", "a sequence", "at once")]
    rows += [(f"{row.num_tokens:,}", format_memory(row.num_bytes), f"{row.num_sequences:,}") for row in plan.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"KV cache per token: {per_token}",
        f"  sequences at once with {format_memory(plan.kv_chosen)} in {plan.kv_cache_dtype}; --max-num-seqs "
        f"({MAX_NUM_SEQS} unless it is given) limits them, too:",
    ]
    lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if 0 < plan.fitting_context < plan.context:
        lines.append(f"  the longest sequence that fits: {plan.fitting_context:,} of {plan.context:,} tokens")
    return lines


def format_count(number: int) -> str:
    """Such as 671.03 B or 8.1 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
