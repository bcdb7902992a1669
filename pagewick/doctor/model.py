"""A report on a model before it is loaded: whether it runs, how large it is, and how it would run here."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pagewick.attention.cache_spec import CACHE_DTYPES
from pagewick.doctor import formats
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.facts import Facts
from pagewick.doctor.findings import format_memory
from pagewick.doctor.formats import StoredFormat
from pagewick.doctor.plan import Device, Kind, Plan, Wishes, cache_groups, make_plan, sizes_that_fit, too_small
from pagewick.doctor.rank_weights import weights_of_rank
from pagewick.doctor.support import Verdict, loadable_formats, refusal
from pagewick.errors import ConfigError, PagewickError
from pagewick.models.config import ModelConfig
from pagewick.models.tensors import model_tensors
from pagewick.quantization import check_supported
from pagewick.weights import files, gguf_header
from pagewick.weights.tensor_check import check_headers


@dataclass(frozen=True, slots=True)
class ModelReport:
    """num_parameters, num_linear, formats, kv_bytes, plan: empty for a model whose config.json Pagewick cannot read.

    num_linear: parameters in linear layers. loadable: names of formats that can be loaded. kv_bytes: of the KV cache
    per token, by the cache's dtype. problem: why the model will not run here; empty if it will. fix: what to do then.
    command: how to start it, if it runs.
    """

    checkpoint: Checkpoint
    verdict: Verdict
    loadable: frozenset[str]
    problem: str
    fix: str
    num_parameters: int | None = None
    num_linear: int | None = None
    formats: tuple[StoredFormat, ...] = ()
    kv_bytes: Mapping[str, float] | None = None
    plan: Plan | None = None
    command: str = ""


def device_of(facts: Facts, *, memory: int | None = None, kind: str | None = None) -> Device:
    """The device on which the engine would run a model: a GPU if there is one, unless the user gives memory or kind.

    Raises ConfigError for a kind that this machine does not have, if `memory` does not say how much memory it has.
    """
    gpus = facts.torch.gpus
    chosen: Kind = "cuda" if gpus else "mps" if facts.torch.has_mps else "cpu"
    if kind is not None and kind.partition(":")[0] in ("cpu", "cuda", "mps"):
        chosen = "cuda" if kind.startswith("cuda") else "mps" if kind == "mps" else "cpu"
    if memory is not None:
        return Device(chosen, memory, memory, max(1, len(gpus)) if chosen == "cuda" else 1, sees_more=True)
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


def describe(checkpoint: Checkpoint, device: Device, wishes: Wishes, flags: Collection[str] = ()) -> ModelReport:
    """Report on a model. flags: more of the command line that starts it, such as a revision. Raises ConfigError."""
    verdict, model = verdict_of(checkpoint), checkpoint.model_config
    if model is None:
        return ModelReport(checkpoint, verdict, loadable_formats(), verdict.reason, fix_of(verdict))
    table = list(model_tensors(model))
    in_memory = memory_of_weights(checkpoint, model, wishes)
    plan = best_plan(model, in_memory, device, wishes)
    problem, fix = _judge_plan(checkpoint, model, verdict, plan, in_memory, wishes)
    return ModelReport(
        checkpoint=checkpoint,
        verdict=verdict,
        loadable=loadable_formats(),
        problem=problem,
        fix=fix,
        num_parameters=formats.count(table),
        num_linear=formats.count([tensor for tensor in table if tensor.is_linear]),
        formats=tuple(formats.stored_formats(table)),
        kv_bytes={
            dtype: sum(group.bytes_per_token for group in cache_groups(model, cache_dtype=dtype))
            for dtype in CACHE_DTYPES
        },
        plan=plan,
        command="" if problem else shlex.join(["pagewick", "serve", checkpoint.model, *flags, *plan.flags]),
    )


def verdict_of(checkpoint: Checkpoint) -> Verdict:
    """Whether Pagewick loads and runs a checkpoint, judged by its config.json, its headers and its file names."""
    model = checkpoint.model_config
    if checkpoint.is_gguf and not gguf_header.IS_LOADABLE:
        return Verdict(
            False, "GGUF files are not supported yet; use the model's original repository, with *.safetensors"
        )
    if model is None or checkpoint.is_gguf:
        return checkpoint.verdict
    try:
        if checkpoint.is_only_described:
            check_supported(checkpoint.config, "", ())
            return checkpoint.verdict
        names = [tensor.name for tensor in checkpoint.tensors]
        shapes = {tensor.name: tensor.shape for tensor in model_tensors(model, names)}
        check_headers(checkpoint.config, shapes, checkpoint.tensors, model.ignored_tensors)
    except PagewickError as error:
        return refusal(error)
    if not files.has_tokenizer(checkpoint.file_names):
        return Verdict(False, "there is no tokenizer.json; write it with transformers: save_pretrained")
    return checkpoint.verdict


def memory_of_weights(checkpoint: Checkpoint, model: ModelConfig, wishes: Wishes) -> int:
    """Bytes of the weights once they are loaded: as they are stored if they are quantized, else in the dtype."""
    if checkpoint.is_quantized:
        return checkpoint.num_bytes
    return weights_of_rank(model, checkpoint, 1, wishes.dtype).total


def best_plan(model: ModelConfig, in_memory: int, device: Device, wishes: Wishes) -> Plan:
    """The plan for the user's wishes, over as few GPUs of this machine as hold the model unless they give a number."""
    plan = make_plan(model, in_memory, device, wishes)
    if wishes.tensor_parallel_size is not None or device.kind != "cuda":
        return plan
    for size in plan.tensor_parallel_sizes:
        if 1 < size <= device.count and too_small(plan):
            plan = make_plan(model, in_memory, device, replace(wishes, tensor_parallel_size=size))
    return plan


def _judge_plan(
    checkpoint: Checkpoint, model: ModelConfig, verdict: Verdict, plan: Plan, in_memory: int, wishes: Wishes
) -> tuple[str, str]:
    """Why a model will not run here as it is wished, and what to do; both empty if it will."""
    if checkpoint.is_only_described and verdict.runs:
        return "there are no weights beside config.json", "download the model, or name it by its id on a hub"
    if not verdict.runs:
        return verdict.reason, fix_of(verdict)
    if missing := too_small(plan):
        return missing, _advice(model, plan, in_memory)
    if wishes.max_model_len is not None and plan.fitting_context < wishes.max_model_len:
        needed = format_memory(plan.rows[-1].num_bytes)
        text = f"{wishes.max_model_len} tokens take {needed} of KV cache, and {format_memory(plan.kv_most)} are left"
        return text, f"use --max-model-len {plan.fitting_context}, or a smaller --kv-cache-dtype"
    return "", ""


def fix_of(verdict: Verdict) -> str:
    """Return the user's options if a model does not run."""
    return f"the nearest that runs: {verdict.nearest}" if verdict.nearest else verdict.fix


def _advice(model: ModelConfig, plan: Plan, in_memory: int) -> str:
    """A way to make a model fit that does not."""
    if plan.dtype == "float32":
        half = make_plan(model, in_memory // 2, plan.device, Wishes(dtype="bfloat16"))
        if not too_small(half):
            return "use --dtype bfloat16, which takes half as much"
    if plan.device.kind == "cuda":
        sizes = [size for size in sizes_that_fit(model, in_memory, plan.device) if size > 1]
        if sizes:
            return f"use {sizes[0]} such GPUs: --tensor-parallel-size {sizes[0]}"
    return "use a smaller model, or a machine with more memory"
