"""Findings and reports as text for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.findings import Finding, format_memory
from pagewick.doctor.model import ModelReport
from pagewick.doctor.plan import MAX_NUM_SEQS, Plan
from pagewick.doctor.support import Verdict
from pagewick.models.config import AttentionConfig, ModelConfig
from pagewick.weights.progress import format_bytes

Style = Callable[[str, str], str]
"""(text, level) -> the text as the terminal shall show it."""

_SHOWN_TENSOR_PARALLEL = 64


def plain(text: str, level: str) -> str:
    """Return the text without colours."""
    return text


def machine_text(findings: Sequence[Finding], style: Style = plain) -> str:
    """A line for each finding, with its fix below it, and a last line with the result."""
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
    """A report on a model, most important first."""
    lines = _what_it_is(report, style)
    if report.plan is not None:
        lines += ["", *_formats(report), "", *_memory(report.plan), "", *_contexts(report.plan, report)]
    lines += problem_lines(report.problem, report.fix, style)
    if report.command:
        lines += ["", "Start it:", f"  {report.command}"]
    return "\n".join(lines)


def problem_lines(problem: str, fix: str, style: Style) -> list[str]:
    """The end of a report: what is wrong, if anything is, and what to do about it."""
    if not problem:
        return []
    return ["", f"{style('problem', 'problem')}  {problem}", *([f"         -> {fix}"] if fix else [])]


def model_json(report: ModelReport) -> dict[str, Any]:
    """A report on a model for programs; sizes in bytes, lengths in tokens."""
    checkpoint, model, plan = report.checkpoint, report.checkpoint.model_config, report.plan
    return {
        **summary_json(checkpoint, report.verdict, report.problem, report.fix),
        **({} if model is None else _sizes(model)),
        "num_parameters": report.num_parameters,
        "weight_bytes": {stored.name: stored.num_bytes for stored in report.formats},
        "loadable": sorted(report.loadable),
        "kv_bytes_per_token": report.kv_bytes,
        "plan": None if plan is None else {**asdict(plan), "needed": plan.needed, "short_by": plan.short_by},
        "command": report.command,
    }


def summary_json(checkpoint: Checkpoint, verdict: Verdict, problem: str, fix: str) -> dict[str, Any]:
    """The fields that every report on a model begins with."""
    return {
        "ok": not problem,
        "model": checkpoint.model,
        "where": checkpoint.where,
        "is_downloaded": checkpoint.is_downloaded,
        "is_only_described": checkpoint.is_only_described,
        "runs": verdict.runs,
        "nearest_supported": verdict.nearest,
        "problem": problem,
        "fix": fix,
        "architecture": checkpoint.architecture,
        "stored_bytes": checkpoint.num_bytes,
    }


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The sizes in config.json. With latent attention, head_dim is that of a query, and all heads count as KV heads."""
    attention = model.layers[0].attention
    if isinstance(attention, AttentionConfig):
        num_kv_heads, head_dim, latent, rope = attention.num_kv_heads, attention.head_dim, 0, 0
    else:
        num_kv_heads, head_dim = attention.num_heads, attention.qk_head_dim
        latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.layers[0].mlp.intermediate_size,
        "num_heads": model.num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "dtype": model.dtype,
        "is_tied": model.tie_word_embeddings,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": rope,
    }


def title(checkpoint: Checkpoint, verdict: Verdict, style: Style) -> str:
    """The first line of a report on a model."""
    runs = style("Pagewick runs it", "ok") if verdict.runs else style("Pagewick does not run it", "problem")
    return f"{checkpoint.model}: {checkpoint.architecture}; {runs}"


def _what_it_is(report: ModelReport, style: Style) -> list[str]:
    checkpoint, model = report.checkpoint, report.checkpoint.model_config
    place = checkpoint.where if checkpoint.is_downloaded else f"{checkpoint.where} (not downloaded)"
    if checkpoint.is_only_described:
        place = f"{checkpoint.where} (no weights; their sizes follow from config.json)"
    dtypes = Counter[str]()
    for tensor in checkpoint.tensors:
        dtypes[tensor.dtype] += tensor.num_bytes
    stored = f"stored as {', '.join(dtype for dtype, _ in dtypes.most_common(3))}, {format_bytes(checkpoint.num_bytes)}"
    lines = [title(checkpoint, report.verdict, style), f"  {place}"]
    if model is None or report.num_parameters is None or report.num_linear is None:
        return [*lines, f"  {len(checkpoint.tensors):,} tensors, {stored}"] if checkpoint.tensors else lines
    num_all, num_linear = format_count(report.num_parameters), format_count(report.num_linear)
    return [
        *lines,
        f"  {num_all} parameters, {num_linear} of them in linear layers; {stored}",
        f"  {describe_sizes(model)}",
        f"  context {model.max_position_embeddings:,} tokens",
    ]


def describe_sizes(model: ModelConfig) -> str:
    """Layers, heads and sizes, in a line."""
    attention = model.layers[0].attention
    if isinstance(attention, AttentionConfig):
        kept = f"{attention.num_kv_heads} KV heads of {attention.head_dim}"
    else:
        kept = f"one latent of {attention.kv_lora_rank} + {attention.qk_rope_head_dim}"
    return (
        f"{model.num_layers} layers, {model.num_heads} heads, {kept}, hidden size {model.hidden_size:,}, "
        f"vocabulary {model.vocab_size:,}"
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
    per_token = ", ".join(f"{format_memory(size)} in {dtype}" for dtype, size in (report.kv_bytes or {}).items())
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
    """Format a number of parameters, such as 671.03 B or 8.1 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
