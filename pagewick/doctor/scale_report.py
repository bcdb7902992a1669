"""A report on a plan for GPUs that are not here, as text for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.clusters import Cluster
from pagewick.doctor.findings import format_memory
from pagewick.doctor.model import fix_of, verdict_of
from pagewick.doctor.plan import Wishes
from pagewick.doctor.report import Style, describe_sizes, format_count, plain, problem_lines, summary_json, title
from pagewick.doctor.scale import ScalePlan, least_offload, model_of, plan_scale
from pagewick.doctor.support import Verdict
from pagewick.models.tensors import model_tensors
from pagewick.weights.progress import format_bytes


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """num_active: parameters that a token meets. problem: why the model will not run there; empty if it will."""

    checkpoint: Checkpoint
    num_parameters: int
    num_active: int
    verdict: Verdict
    plan: ScalePlan
    problem: str
    fix: str


def describe_scale(
    checkpoint: Checkpoint, cluster: Cluster, wishes: Wishes, *, num_sequences: int, experts_per_rank: int = 0
) -> ScaleReport:
    """Report on a model on a machine that is not here; the arguments are plan_scale's. Raises ConfigError."""
    plan = plan_scale(checkpoint, cluster, wishes, num_sequences=num_sequences, experts_per_rank=experts_per_rank)
    model = model_of(checkpoint)
    counts: Counter[str] = Counter()
    for tensor in model_tensors(model):
        counts[tensor.role] += tensor.num_elements
    idle = 0.0 if model.tie_word_embeddings else float(counts["embedding"])
    if plan.experts is not None:
        idle += counts["expert"] * (1 - plan.experts.num_experts_per_tok / plan.experts.num_experts)
    total = sum(counts.values())
    verdict = verdict_of(checkpoint)
    problem, fix = _judge(checkpoint, cluster, wishes, plan, verdict)
    return ScaleReport(checkpoint, total, round(total - idle), verdict, plan, problem, fix)


def _judge(
    checkpoint: Checkpoint, cluster: Cluster, wishes: Wishes, plan: ScalePlan, verdict: Verdict
) -> tuple[str, str]:
    if plan.num_fitting == 0:
        memory = format_memory(cluster.kind.memory)
        if plan.needed > cluster.kind.memory:
            problem = f"{format_memory(plan.needed)} are needed on each GPU, and it has {memory}"
        else:
            problem = (
                f"{plan.context:,} tokens take {format_memory(plan.kv_per_sequence)} of KV cache on each GPU, and "
                f"{format_memory(plan.kv_room)} are left of {memory}"
            )
        least = least_offload(checkpoint, cluster, wishes)
        if least is not None:
            return problem, f"use --num-experts-offload-per-rank {least}, more GPUs, or more of --nodes"
        return problem, "use more GPUs or more of --nodes, or a shorter --max-model-len"
    if not verdict.runs:
        return verdict.reason, fix_of(verdict)
    return "", ""


def scale_text(report: ScaleReport, style: Style = plain) -> str:
    """The model, the memory of each GPU, the bytes that a step moves, and the speed that these allow."""
    checkpoint = report.checkpoint
    note = "no weights here; their sizes follow from config.json; " if checkpoint.is_only_described else ""
    num_all, num_active = format_count(report.num_parameters), format_count(report.num_active)
    lines = [
        title(checkpoint, report.verdict, style),
        f"  {num_all} parameters, of which a token meets {num_active}; {note}{format_bytes(checkpoint.num_bytes)}",
        f"  {describe_sizes(model_of(checkpoint))}",
        "",
        *_memory(report.plan),
    ]
    if report.plan.steps:
        lines += ["", *_steps(report.plan), *_assumptions(report.plan)]
    return "\n".join([*lines, *problem_lines(report.problem, report.fix, style)])


def scale_json(report: ScaleReport) -> dict[str, Any]:
    """A report on a plan for programs; sizes in bytes, in the plan of one rank; times in seconds, lengths in tokens."""
    plan = report.plan
    scale = asdict(plan)
    scale["num_ranks"], scale["needed"] = plan.cluster.num_ranks, plan.needed
    for step, found in zip(plan.steps, scale["steps"], strict=True):
        found["num_bytes"], found["seconds"] = step.num_bytes, step.seconds
        found["tokens_per_second"] = step.tokens_per_second
        for cost, entry in zip(step.costs, found["costs"], strict=True):
            entry["seconds"] = cost.seconds
    return {
        **summary_json(report.checkpoint, report.verdict, report.problem, report.fix),
        "num_parameters": report.num_parameters,
        "num_active_parameters": report.num_active,
        "scale": scale,
    }


def _memory(plan: ScalePlan) -> list[str]:
    kind, cluster = plan.cluster.kind, plan.cluster
    links = [f"{_rate(kind.host_link)} to the host"]
    links += [f"{_rate(kind.gpu_link)} to other GPUs"] if cluster.num_gpus > 1 else []
    links += [f"{_rate(cluster.network)} to other nodes"] if cluster.num_nodes > 1 else []
    where = f"{cluster.num_nodes} nodes of {cluster.num_gpus} x" if cluster.num_nodes > 1 else f"{cluster.num_gpus} x"
    parts = {"weights": plan.weights, "runtime": plan.runtime, "activations (estimated)": plan.activations}
    shown = " + ".join(f"{format_memory(size)} {name}" for name, size in parts.items())
    lines = [
        f"{where} {kind.name}: {format_memory(kind.memory)} at {_rate(kind.bandwidth)}; {', '.join(links)}",
        "Memory of each GPU:",
        f"  needed: {shown} = {format_memory(plan.needed)}",
    ]
    if plan.num_offloaded and plan.experts is not None:
        lines.append(
            f"  {plan.num_offloaded} of {plan.experts.num_experts} experts of each layer in host memory: "
            f"{format_memory(plan.host)} for each GPU, {format_memory(plan.host * cluster.num_gpus)} in each node"
        )
    if not plan.num_fitting:
        return lines
    fitting = f"{plan.num_fitting:,} sequences of {plan.context:,} tokens, or one of {plan.longest:,}"
    lines.append(
        f"  KV cache: {format_memory(plan.kv_room)}, {format_memory(plan.kv_bytes_per_token)} per token in "
        f"{plan.kv_cache_dtype}: {fitting}"
    )
    return lines


def _steps(plan: ScalePlan) -> list[str]:
    """A table: a row for each way of moving bytes, two columns for each number of sequences."""
    rows = {cost.name: ["", ""] * len(plan.steps) for step in plan.steps for cost in step.costs}
    for index, step in enumerate(plan.steps):
        for cost in step.costs:
            rows[cost.name][2 * index : 2 * index + 2] = [format_bytes(cost.num_bytes), _time(cost.seconds)]

    def row(name: str, cell: Callable[[Any], list[str]]) -> list[str]:
        return [name, *(text for step in plan.steps for text in cell(step))]

    table = [
        row("", lambda step: ["sequences:", f"{step.num_sequences:,}"]),
        *([name, *cells] for name, cells in rows.items()),
        row("all", lambda step: [format_bytes(step.num_bytes), _time(step.seconds)]),
        row("tokens per second, at most", lambda step: ["", f"{step.tokens_per_second:,.0f}"]),
    ]
    if plan.experts is not None:
        table.append(row("experts used in each layer", lambda step: ["", f"{step.experts_met:,.1f}"]))
    if plan.num_offloaded:
        table.append(row("of them in host memory", lambda step: ["", f"{step.experts_copied:,.1f}"]))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [f"Each GPU moves, for a new token of each sequence with {plan.context:,} in the cache:"]
    for line in table:
        cells = [
            line[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def _assumptions(plan: ScalePlan) -> list[str]:
    lines = ["Estimate: rates are from datasheets, experts are chosen evenly, arithmetic and latencies take no time."]
    if plan.num_collectives:
        each = plan.num_collectives / 1000
        lines.append(
            f"Ranks exchange data {plan.num_collectives} times in a step: each microsecond of latency adds "
            f"{each:.2f} ms to it."
        )
    return lines


def _rate(rate: int) -> str:
    return f"{format_bytes(rate)}/s"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 0.1 else f"{1000 * seconds:,.0f} ms"
