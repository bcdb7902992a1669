"""Findings and reports as text for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.clusters import Cluster
from pagewick.doctor.findings import Finding, format_memory
from pagewick.doctor.model import ModelReport
from pagewick.doctor.plan import MAX_NUM_SEQS, Plan
from pagewick.doctor.scale import DecodeStep, ScalePlan
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig
from pagewick.weights.progress import format_bytes


def machine_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, with its fix below it, and a last line with the result."""
    count = sum(finding.level == "problem" for finding in findings)
    result = f"{count} problem{'s' * (count != 1)}" if count else "Pagewick can run on this machine."
    return "\n".join([*_lines(findings), "", result])


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.ljust(7)}  {finding.subject.ljust(width)}  {finding.text}")
        lines += [f"{' ' * (width + 11)}-> {finding.fix}"] if finding.fix else []
    return lines


def machine_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings, and whether none of them is a problem."""
    return {
        "ok": not any(finding.level == "problem" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def model_text(report: ModelReport) -> str:
    """A report on a model, most important first."""
    plan, scale = report.plan, report.scale
    lines = [f"{report.checkpoint.model}: {report.checkpoint.architecture}; {headline(report)}", *_what_it_is(report)]
    if scale is not None:
        lines += ["", *_cluster(scale), *(_steps(scale) if scale.steps else [])]
    elif plan is not None:
        lines += ["", *_formats(report), "", *_memory(plan, report.checkpoint)]
        lines += [] if plan.short_by else ["", *_contexts(plan, report)]
    if report.findings:
        lines += ["", *_lines(report.findings)]
    if report.command:
        there = " there" if plan is not None and plan.device.is_planned else ""
        lines += ["", f"Start it{there}:", f"  {report.command}"]
    return "\n".join(lines)


def headline(report: ModelReport) -> str:
    """One line: whether the model runs here, or whether it would fit a planned machine or GPUs."""
    plan, model, scale = report.plan, report.checkpoint.model_config, report.scale
    if plan is None or model is None:
        return "Pagewick does not run it"
    device = plan.device
    planned = f"in {format_memory(device.memory)} ({device.kind})" if device.is_planned else "here"
    place = f"on {_gpus(scale.cluster)}" if scale is not None else planned
    if not report.verdict.runs:
        return f"Pagewick does not run it; it {'does not fit' if plan.missing else 'fits'} {place}"
    if plan.missing:
        return f"does not fit {place}: {plan.missing}"
    if report.problems:
        return f"fits {place}, but {report.problems[0].text}"
    if plan.fitting_context < plan.context:
        place += " with the flags below"
    elif plan.context < model.max_position_embeddings:
        place += f" with up to {plan.context:,} tokens"
    if device.is_planned:
        return f"fits {place}; planned, not run"
    return f"runs {place}" if device.kind == "cpu" else f"fits {place}; planned, not run: GPUs are untested so far"


def _gpus(cluster: Cluster) -> str:
    nodes = f"{cluster.num_nodes} nodes of " if cluster.num_nodes > 1 else ""
    return f"{nodes}{cluster.num_gpus} x {cluster.kind.name}"


def model_json(report: ModelReport) -> dict[str, Any]:
    """A report on a model for programs; sizes in bytes, times in seconds, lengths in tokens."""
    checkpoint, model, plan = report.checkpoint, report.checkpoint.model_config, report.plan
    first = next(iter(report.problems), Finding("ok", "", ""))
    return {
        "ok": not report.problems,
        "model": checkpoint.model,
        "headline": headline(report),
        "where": checkpoint.where,
        "is_downloaded": checkpoint.is_downloaded,
        "is_only_described": checkpoint.is_only_described,
        "runs": report.verdict.runs,
        "nearest_supported": report.verdict.nearest,
        "problem": first.text,
        "fix": first.fix,
        "findings": [asdict(finding) for finding in report.findings],
        "architecture": checkpoint.architecture,
        "stored_bytes": checkpoint.num_bytes,
        "quantization": None if checkpoint.plan is None else checkpoint.plan.mix,
        **({} if model is None else _sizes(model)),
        "num_parameters": report.num_parameters,
        "num_active_parameters": report.num_active,
        "weight_bytes": report.formats,
        "kv_bytes_per_token": report.kv_bytes,
        "plan": None if plan is None else {**asdict(plan), "needed": plan.needed, "short_by": plan.short_by},
        "scale": None if report.scale is None else _scale_json(report.scale),
        "command": report.command,
    }


def _scale_json(scale: ScalePlan) -> dict[str, Any]:
    found = asdict(scale)
    del found["memory"]  # it is the report's plan
    found["num_ranks"] = scale.cluster.num_ranks
    for step, entry in zip(scale.steps, found["steps"], strict=True):
        entry |= {name: getattr(step, name) for name in ("num_bytes", "seconds", "tokens_per_second")}
        for cost, cost_entry in zip(step.costs, entry["costs"], strict=True):
            cost_entry["seconds"] = cost.seconds
    return found


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """The sizes in config.json, 0 for those of parts that no layer has.

    With latent attention, head_dim is that of a query, and all heads count as KV heads. A key that is its own value
    counts as one KV head.
    """
    attention = model.attention
    kept = (0, 0, 0, 0)
    if isinstance(attention, AttentionConfig):
        kept = (attention.num_kv_heads, attention.head_dim, 0, 0)
    elif (latent := model.latent) is not None:
        kept = (latent.num_heads, latent.qk_head_dim, latent.kv_lora_rank, latent.qk_rope_head_dim)
    elif (rows := model.rows) is not None:
        kept = (1, rows.head_dim, 0, rows.rope_dim)
    same = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_position_embeddings", "dtype")
    return {
        **{name: getattr(model, name) for name in same},
        "intermediate_size": next((layer.mlp.intermediate_size for layer in model.layers if layer.mlp is not None), 0),
        "is_tied": model.tie_word_embeddings,
        **dict(zip(("num_kv_heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim"), kept, strict=True)),
    }


def _what_it_is(report: ModelReport) -> list[str]:
    checkpoint, model = report.checkpoint, report.checkpoint.model_config
    place = checkpoint.where if checkpoint.is_downloaded else f"{checkpoint.where} (not downloaded)"
    if checkpoint.is_only_described:
        place = f"{checkpoint.where} (no weights; their sizes follow from config.json)"
    dtypes = Counter[str]()
    for tensor in checkpoint.tensors:
        dtypes[tensor.label or tensor.dtype] += tensor.num_bytes
    stored = f"stored as {', '.join(dtype for dtype, _ in dtypes.most_common(3))}, {format_bytes(checkpoint.num_bytes)}"
    if model is None or report.num_parameters is None or report.num_active is None:
        counted = [f"  {len(checkpoint.tensors):,} tensors, {stored}"] if checkpoint.tensors else []
        return [f"  {place}", *counted]
    attention = model.attention
    if isinstance(attention, AttentionConfig):
        heads = f"{attention.num_heads} heads, {attention.num_kv_heads} KV heads of {attention.head_dim}"
    elif (rows := model.rows) is not None:
        heads = f"{rows.num_heads} heads, one key of {rows.head_dim} that is its own value"
    elif (latent := model.latent) is not None:
        size = f"{latent.kv_lora_rank} + {latent.qk_rope_head_dim}"
        heads = f"{latent.num_heads} heads, one latent of {size}"
    else:
        heads = "no attention"
    num_all, num_active = format_count(report.num_parameters), format_count(report.num_active)
    return [
        f"  {place}",
        f"  {num_all} parameters, of which a token meets {num_active}; {stored}",
        f"  {model.num_layers} layers, {heads}, hidden size {model.hidden_size:,}, "
        f"vocabulary {model.vocab_size:,}, context {model.max_position_embeddings:,} tokens",
    ]


def _formats(report: ModelReport) -> list[str]:
    lines = ["Weights by format:"]
    for name, num_bytes in (report.formats or {}).items():
        lines.append(f"  {name.ljust(10)} {format_bytes(num_bytes):>8}")
    return lines


def _memory(plan: Plan, checkpoint: Checkpoint) -> list[str]:
    device = plan.device
    place = "each GPU" if device.kind == "cuda" else "the planned machine" if device.is_planned else "this machine"
    stored = "weights as stored" if checkpoint.is_quantized else f"weights in {plan.dtype}"
    if checkpoint.plan is not None:
        stored = f"weights quantized to {checkpoint.plan.mix}"
    narrow = "" if checkpoint.plan is None else checkpoint.plan.describe_narrow()
    sizes = ", ".join(map(str, plan.tensor_parallel_sizes))
    num_stages = plan.wishes.pipeline_parallel_size
    stages = "" if num_stages == 1 else f" in each of {num_stages} stages; the numbers are those of the largest"
    left = (
        f"  left for the KV cache: {format_memory(plan.kv_most)}; Pagewick takes {format_memory(plan.kv_default)} "
        "unless --kv-cache-memory says more"
    )
    return [
        f"Memory of {place} ({device.kind}, {format_memory(device.memory)} free; {stored}):",
        _needed(plan),
        *([f"  {narrow}"] if narrow else []),
        *([] if plan.short_by else [left]),
        f"  tensor parallel sizes that work: {sizes}; planned with {plan.tensor_parallel_size}{stages}",
    ]


def _needed(plan: Plan) -> str:
    parts = [("weights", plan.weights), ("runtime", plan.runtime), ("activations (estimated)", plan.activations)]
    parts += [("kept free", plan.reserve)] if plan.reserve else []
    shown = " + ".join(f"{format_memory(size)} {name}" for name, size in parts)
    return f"  needed: {shown} = {format_memory(plan.needed)}"


def _contexts(plan: Plan, report: ModelReport) -> list[str]:
    sizes: dict[float, list[str]] = {}
    for dtype, size in (report.kv_bytes or {}).items():
        sizes.setdefault(size, []).append(dtype)
    per_token = ", ".join(f"{format_memory(size)} in {' or '.join(dtypes)}" for size, dtypes in sizes.items())
    rows = [["tokens", "a sequence", "at once"]]
    rows += [[f"{row.num_tokens:,}", format_memory(row.num_bytes), f"{row.num_sequences:,}"] for row in plan.rows]
    lines = [
        f"KV cache per token: {per_token}",
        f"  sequences at once with {format_memory(plan.kv_chosen)} in {plan.kv_cache_dtype}; --max-num-seqs "
        f"({MAX_NUM_SEQS} unless it is given) limits them, too:",
    ]
    lines += _table(rows)
    if 0 < plan.fitting_context < plan.context:
        lines.append(f"  the longest sequence that fits: {plan.fitting_context:,} of {plan.context:,} tokens")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def _cluster(scale: ScalePlan) -> list[str]:
    """The GPUs, and the memory of each."""
    cluster, kind, plan = scale.cluster, scale.cluster.kind, scale.memory
    links = [f"{_rate(kind.host_link)} to the host"]
    links += [f"{_rate(kind.gpu_link)} to other GPUs"] if cluster.num_gpus > 1 else []
    links += [f"{_rate(cluster.network)} to other nodes"] if cluster.num_nodes > 1 else []
    lines = [
        f"{_gpus(cluster)}: {format_memory(kind.memory)} at {_rate(kind.bandwidth)}; {', '.join(links)}",
        "Memory of each GPU:",
        _needed(plan),
    ]
    if scale.num_offloaded:
        lines.append(
            f"  {scale.num_offloaded} of {scale.num_experts} experts of each layer in host memory: "
            f"{format_memory(scale.host)} for each GPU, {format_memory(scale.host * cluster.num_gpus)} in each node"
        )
    if scale.num_fitting:
        lines.append(
            f"  KV cache: {format_memory(plan.kv_chosen)}, {format_memory(plan.kv_bytes_per_token)} per token in "
            f"{plan.kv_cache_dtype}: {scale.num_fitting:,} sequences of {plan.context:,} tokens, or one of "
            f"{scale.longest:,}"
        )
    return lines


def _steps(scale: ScalePlan) -> list[str]:
    """A table: a row for each way of moving bytes, two columns for each number of sequences."""
    names = list(dict.fromkeys(cost.name for step in scale.steps for cost in step.costs))

    def row(name: str, *cells: Callable[[DecodeStep], str]) -> list[str]:
        return [name, *(cell(step) for step in scale.steps for cell in cells)]

    def empty(step: DecodeStep) -> str:
        return ""

    rows = [row("", lambda step: "sequences:", lambda step: f"{step.num_sequences:,}")]
    for name in names:
        found = [{cost.name: cost for cost in step.costs}.get(name) for step in scale.steps]
        cells = [("", "") if cost is None else (format_bytes(cost.num_bytes), _time(cost.seconds)) for cost in found]
        rows.append([name, *(text for pair in cells for text in pair)])
    rows.append(row("all", lambda step: format_bytes(step.num_bytes), lambda step: _time(step.seconds)))
    rows.append(row("tokens per second, at most", empty, lambda step: f"{step.tokens_per_second:,.0f}"))
    if scale.num_experts:
        rows.append(row("experts used in each layer", empty, lambda step: f"{step.experts_met:,.1f}"))
    if scale.num_offloaded:
        rows.append(row("of them in host memory", empty, lambda step: f"{step.experts_copied:,.1f}"))
    width = max(len(row[0]) for row in rows)
    lines = [
        "",
        f"Each GPU moves, for a new token of each sequence with {scale.memory.context:,} in the cache:",
        *_table([[line[0].ljust(width), *line[1:]] for line in rows]),
        "Estimate: rates are from datasheets, experts are chosen evenly, arithmetic and latencies take no time.",
    ]
    if scale.num_collectives:
        lines.append(
            f"Ranks exchange data {scale.num_collectives} times in a step: each microsecond of latency adds "
            f"{scale.num_collectives / 1000:.2f} ms to it."
        )
    return lines


def _rate(rate: int) -> str:
    return f"{format_bytes(rate)}/s"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 0.1 else f"{1000 * seconds:,.0f} ms"


def format_count(number: int) -> str:
    """Format a number of parameters, such as 671.03 B or 8.1 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"
