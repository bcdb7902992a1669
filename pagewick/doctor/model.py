"""A report on a model before it is loaded: whether it runs, how large it is, and how it would run here or elsewhere."""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from pagewick.doctor.checkpoint import Checkpoint, quantized_at_load
from pagewick.doctor.clusters import Cluster
from pagewick.doctor.facts import Facts
from pagewick.doctor.findings import Finding, format_memory, note, problem
from pagewick.doctor.formats import GGUF_FORMATS, count, stored_formats
from pagewick.doctor.plan import (
    BLOCK_SIZE,
    CanShare,
    Device,
    Kind,
    Plan,
    Wishes,
    best_plan,
    cache_dtypes,
    cache_groups,
    make_plan,
    sizes_that_fit,
)
from pagewick.doctor.rank_weights import RankWeights, weights_of_rank
from pagewick.doctor.scale import ScalePlan, least_offload, plan_scale
from pagewick.doctor.support import Verdict, refusal
from pagewick.errors import ConfigError, PagewickError
from pagewick.models.config import ModelConfig
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.models.tensors import model_tensors
from pagewick.quantization.at_load_memory import most_quantizing_bytes
from pagewick.quantization.plan import choose_mix
from pagewick.weights import files
from pagewick.weights.progress import format_bytes
from pagewick.weights.tensor_check import check_headers, cut_inside_block
from pagewick.weights.tensor_headers import TensorInfo


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The fields from num_parameters on are empty for a model whose config.json Pagewick cannot read.

    findings: notes, and problems that keep the model from running as the user wishes. num_active: parameters that a
    token meets. kv_bytes: of the KV cache per token, by the cache's dtype. scale: the plan for GPUs that are not here;
    None for this machine. command: how to start it, if it runs.
    """

    checkpoint: Checkpoint
    verdict: Verdict
    findings: tuple[Finding, ...]
    num_parameters: int | None = None
    num_active: int | None = None
    formats: Mapping[str, int] | None = None
    kv_bytes: Mapping[str, float] | None = None
    plan: Plan | None = None
    scale: ScalePlan | None = None
    command: str = ""

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "problem"]


def device_of(facts: Facts, *, memory: int | None = None, kind: Kind | None = None) -> Device:
    """The device on which the engine would run a model: a GPU if there is one, unless the user gives memory or kind.

    Raises ConfigError for a kind that this machine does not have, if `memory` does not say how much memory it has.
    """
    gpus = facts.torch.gpus
    chosen = kind or ("cuda" if gpus else "mps" if facts.torch.has_mps else "cpu")
    if memory is not None:
        return Device(chosen, memory, memory, max(1, len(gpus)) if chosen == "cuda" else 1, is_planned=True)
    if (chosen == "cuda" and not gpus) or (chosen == "mps" and not facts.torch.has_mps):
        raise ConfigError(
            f"torch sees no GPU here for --device {kind}; pagewick doctor says why\n"
            "  plan for one with --memory 24GiB, or for this machine with --device cpu"
        )
    if chosen == "cuda":
        free, total = min(gpu.free_memory for gpu in gpus), min(gpu.total_memory for gpu in gpus)
        return Device("cuda", free, total, len(gpus))
    limit = facts.limits.memory
    total = facts.memory_total if limit is None else min(limit, facts.memory_total)
    return Device(chosen, facts.usable_memory, total)


def best_at_load(checkpoint: Checkpoint, device: Device, wishes: Wishes) -> tuple[Checkpoint, list[Finding]]:
    """Plan what --quantization auto would do on a device: the checkpoint, and why. Raises as quantized_at_load does."""
    model, num_ranks = checkpoint.model_config, wishes.tensor_parallel_size or 1
    if model is None:
        return checkpoint, []

    def planned(mix: str | None) -> Checkpoint:
        return checkpoint if mix is None else quantized_at_load(checkpoint, mix)

    def bytes_in(mix: str | None) -> int | None:
        found = planned(mix)
        if _is_cut(model, found.kept_tensors, num_ranks):
            return None
        num_shares = 1 if device.kind == "cuda" else num_ranks
        return weights_of_rank(model, found, num_ranks, wishes.dtype, wishes.pipeline_parallel_size).total * num_shares

    mix, arithmetic = choose_mix(bytes_in, device.memory, wishes.dtype or model.dtype)
    return planned(mix), [note("quantization", f"auto is {mix or 'none'}: {arithmetic}", "")]


def describe(
    checkpoint: Checkpoint,
    place: Device | Cluster,
    wishes: Wishes,
    *,
    flags: Collection[str] = (),
    hindrances: Sequence[Finding] = (),
    experts_per_rank: int = 0,
) -> ModelReport:
    """Report on a model. Raises ConfigError for impossible wishes.

    flags: more of the command line that starts it, such as a revision. hindrances: problems of this machine.
    experts_per_rank: with a cluster, as plan_scale has it.
    """
    verdict, model = verdict_of(checkpoint), checkpoint.model_config
    refused = () if verdict.runs else (problem("model", verdict.reason, verdict.fix),)
    if model is None:
        return ModelReport(checkpoint, verdict, refused)

    @functools.cache
    def weights_of(num_ranks: int, dtype: str | None = wishes.dtype) -> RankWeights:
        return weights_of_rank(model, checkpoint, num_ranks, dtype, wishes.pipeline_parallel_size)

    @functools.cache
    def can_share(num_ranks: int) -> bool:
        return not verdict.runs or not _is_cut(model, checkpoint.kept_tensors, num_ranks)

    if isinstance(place, Cluster):
        scale = plan_scale(checkpoint, model, place, wishes, experts_per_rank=experts_per_rank)
        plan = scale.memory
    else:
        scale, plan = None, best_plan(model, lambda size: weights_of(size).total, place, wishes, can_share)
    table = list(model_tensors(model))
    formats = stored_formats(table, model)
    findings = [*refused, *hindrances]
    plan = replace(plan, tensor_parallel_sizes=tuple(filter(can_share, plan.tensor_parallel_sizes)))
    if (size := plan.tensor_parallel_size) not in plan.tensor_parallel_sizes:
        working = ", ".join(map(str, plan.tensor_parallel_sizes))
        reason = f"cannot share {model.unshared}" if model.unshared else "would cut weights inside a block"
        findings.append(problem("ranks", f"{size} ranks {reason}", f"use {working}"))
    if plan.missing:
        usable = {} if checkpoint.is_quantized or checkpoint.plan is not None else formats
        fix = _advice(model, plan, is_here=scale is None, weights_of=weights_of, can_share=can_share, formats=usable)
        findings.append(problem("memory", plan.missing, fix))
    if checkpoint.is_only_described and verdict.runs and scale is None:
        fix = "download the model, or name it by its id on a hub"
        findings.append(problem("weights", "there are no weights beside config.json", fix))
    findings += _quantizing(model, checkpoint, plan)
    findings += _waiting(plan)
    is_ready = scale is None and all(finding.level != "problem" for finding in findings)
    return ModelReport(
        checkpoint=checkpoint,
        verdict=verdict,
        findings=tuple(findings),
        num_parameters=count(table),
        num_active=_num_active(model, table),
        formats=formats,
        kv_bytes={
            dtype: sum(group.bytes_per_token for group in cache_groups(model, cache_dtype=dtype))
            for dtype in cache_dtypes(model)
        },
        plan=plan,
        scale=scale,
        command=shlex.join(["pagewick", "serve", checkpoint.model, *flags, *plan.flags]) if is_ready else "",
    )


def _is_cut(model: ModelConfig, tensors: Collection[TensorInfo], num_ranks: int) -> bool:
    """Whether this number of ranks cuts a tensor inside a block, or cannot share the model for another reason."""
    if num_ranks > 1 and model.unshared:
        return True
    blocks, names = [tensor for tensor in tensors if tensor.is_in_blocks], [tensor.name for tensor in tensors]
    table = model_tensors(model, names, num_ranks=num_ranks) if blocks else ()
    return bool(cut_inside_block(blocks, {tensor.name: tensor.kept[-1] for tensor in table}))


def _num_active(model: ModelConfig, table: Collection[ModelTensor]) -> int:
    """Parameters that a token meets: all but those of the embedding, experts that it does not go to, and images."""
    counts: Counter[str] = Counter()
    for tensor in table:
        counts[tensor.role] += tensor.num_elements
    idle = float(counts["vision"]) + (0.0 if model.tie_word_embeddings else counts["embedding"])
    if model.mixtures:
        mixture = model.mixtures[0]
        idle += counts["expert"] * (1 - mixture.routing.top_k / (mixture.num_experts + mixture.num_identities))
    return round(sum(counts.values()) - idle)


def verdict_of(checkpoint: Checkpoint) -> Verdict:
    """Whether Pagewick loads and runs a checkpoint, judged by its config.json, its headers and its file names."""
    model = checkpoint.model_config
    if model is None or not checkpoint.verdict.runs or checkpoint.is_only_described:
        return checkpoint.verdict
    try:
        names = [tensor.name for tensor in checkpoint.tensors]
        table = list(model_tensors(model, names))
        shapes = {tensor.name: tensor.shape for tensor in table}
        tables = [tensor.name for tensor in table if tensor.role == "table"]
        check_headers(shapes, checkpoint.tensors, model.ignored_tensors, tables)
    except PagewickError as error:
        return refusal(error)
    if not checkpoint.is_gguf and not files.has_tokenizer(checkpoint.file_names):
        return Verdict(False, "there is no tokenizer.json", fix="write it with transformers: save_pretrained")
    return checkpoint.verdict


def _quantizing(model: ModelConfig, checkpoint: Checkpoint, plan: Plan) -> list[Finding]:
    """A note about the memory that quantizing at load needs on a GPU; a problem if there is room only for steps."""
    if checkpoint.plan is None or plan.device.kind != "cuda":
        return []
    names, dtypes = [tensor.name for tensor in checkpoint.tensors], {one.name: one.dtype for one in checkpoint.tensors}
    table = model_tensors(model, names, num_ranks=plan.tensor_parallel_size)
    needed = most_quantizing_bytes(table, checkpoint.plan.formats, dtypes)
    text = f"quantizing takes {format_memory(needed)} of a GPU beside the weights, until they are loaded"
    missing = plan.weights + plan.runtime + needed - plan.device.memory
    if missing <= 0 or plan.missing:
        return [note("quantization", text, "")]
    fix = "use a GPU with more memory, or write a file with these formats once: pagewick quantize"
    return [problem("memory", f"{text}: {format_memory(missing)} are missing", fix)]


def _waiting(plan: Plan) -> list[Finding]:
    """A note if fewer sequences than the user wants fit at once."""
    wanted, fitting = plan.wishes.max_num_seqs or 0, plan.rows[-1].num_sequences
    if plan.missing or fitting >= wanted:
        return []
    text = f"{fitting:,} of {wanted:,} fit at once with {plan.rows[-1].num_tokens:,} tokens each; the others wait"
    return [note("sequences", text, f"use --max-num-seqs {fitting}, or a shorter --max-model-len, if none is to wait")]


def _advice(
    model: ModelConfig,
    plan: Plan,
    *,
    is_here: bool,
    weights_of: Callable[..., RankWeights],
    can_share: CanShare,
    formats: Mapping[str, int],
) -> str:
    """Ways to make the model fit, most convenient first; each has been planned and found to fit.

    formats: bytes of the model in each format that its weights could have; empty if they cannot be quantized.
    """
    num_ranks, ways = plan.tensor_parallel_size, []

    def fits(weight_bytes: int, dtype: str | None) -> bool:
        return not make_plan(model, lambda size: weight_bytes, plan.device, replace(plan.wishes, dtype=dtype)).missing

    if plan.dtype == "float32" and fits(weights_of(num_ranks, "bfloat16").total, "bfloat16"):
        ways.append("--dtype bfloat16, which takes half as much")
    if plan.fitting_context >= BLOCK_SIZE:
        ways.append(f"--max-model-len {plan.fitting_context}")
        for dtype, part in (("int8", "half"), ("int4", "about a quarter")):
            if plan.kv_cache_dtype not in ("int4", dtype) and dtype in cache_dtypes(model):
                wishes = replace(plan.wishes, kv_cache_dtype=dtype)
                if not make_plan(model, lambda size: weights_of(size).total, plan.device, wishes).missing:
                    ways.append(f"--kv-cache-dtype {dtype}, which takes {part} of bfloat16")
                    break
    if plan.device.kind == "cuda":
        if least := least_offload(model, weights_of(num_ranks), plan):
            ways.append(f"--num-experts-offload-per-rank {least}")
        wishes = replace(plan.wishes, tensor_parallel_size=num_ranks)
        sizes = sizes_that_fit(model, lambda size: weights_of(size).total, plan.device, wishes, can_share)
        for size in islice(sizes, 1):
            ways.append(f"{size} such GPUs" + (f": --tensor-parallel-size {size}" if is_here else ""))
    smaller = [
        name
        for name in GGUF_FORMATS
        if (share := -(-formats.get(name, 0) // num_ranks)) and share < weights_of(num_ranks).total
        if plan.fitting_context < BLOCK_SIZE and fits(share, plan.wishes.dtype)
    ]
    if smaller:
        best = max(smaller, key=lambda name: formats[name])
        ways.append(f"--quantization {best.lower()}, which takes {format_bytes(formats[best])}")
    return f"use {'; or '.join(ways or ['a smaller model, or a machine with more memory'])}"
