"""What can be said of a model before it is loaded: does it run, how large is it, and how would it run here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagewick.attention.cache_spec import CACHE_DTYPES
from pagewick.doctor import parameters
from pagewick.doctor.checkpoint import Checkpoint
from pagewick.doctor.facts import Facts
from pagewick.doctor.findings import format_memory
from pagewick.doctor.parameters import StoredFormat
from pagewick.doctor.plan import BLOCK_SIZE, Device, Kind, Plan, Wishes, make_plan, sizes_that_fit, too_small
from pagewick.doctor.shape import DTYPE_BYTES
from pagewick.doctor.support import Verdict, judge, loadable_formats, refusal
from pagewick.errors import ConfigError, PagewickError
from pagewick.weights import files, gguf_header
from pagewick.weights.tensor_headers import TensorInfo

TensorCheck = Callable[[Mapping[str, Any], Collection[TensorInfo]], None]
"""(config.json, what the files hold) -> ModelLoadError if they do not belong together."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """loadable: names among `formats`. plan: None where the KV cache cannot be computed.

    problem: why it will not run here; empty if it will. fix: what to do then. command: how to start it, if it runs.
    """

    checkpoint: Checkpoint
    num_parameters: int
    num_linear: int
    verdict: Verdict
    formats: tuple[StoredFormat, ...]
    loadable: frozenset[str]
    kv_bytes: Mapping[str, float]
    plan: Plan | None
    problem: str
    fix: str
    command: str


def device_of(facts: Facts, *, memory: int | None = None, kind: str | None = None) -> Device:
    """Where the engine would run a model: on a GPU if there is one. memory and kind are what the user says instead.

    Raises ConfigError for a kind that is not here, of which only `memory` could say how much it has.
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


def describe(
    checkpoint: Checkpoint,
    device: Device,
    wishes: Wishes,
    flags: Collection[str] = (),
    check_tensors: TensorCheck | None = None,
) -> ModelReport:
    """All about a model. flags: more of the command line that starts it, such as a revision. Raises ConfigError."""
    shape = checkpoint.shape
    found = parameters.parameters_of(checkpoint.tensors, checkpoint.config, is_tied=shape.is_tied)
    num_parameters = parameters.count(found)
    verdict = verdict_of(checkpoint, check_tensors)
    in_memory = memory_of_weights(checkpoint, num_parameters, wishes)
    plan = None if shape.other_cache else best_plan(checkpoint, in_memory, device, wishes)
    problem, fix = judge_plan(checkpoint, verdict, plan, in_memory, wishes)
    command = ""
    if plan is not None and not problem:
        command = shlex.join(["pagewick", "serve", checkpoint.model, *flags, *plan.flags])
    return ModelReport(
        checkpoint=checkpoint,
        num_parameters=num_parameters,
        num_linear=parameters.count(parameter for parameter in found if parameter.kind == "linear"),
        verdict=verdict,
        formats=tuple(parameters.stored_formats(found)),
        loadable=loadable_formats(),
        kv_bytes={} if shape.other_cache else kv_bytes_per_token(checkpoint),
        plan=plan,
        problem=problem,
        fix=fix,
        command=command,
    )


def verdict_of(checkpoint: Checkpoint, check_tensors: TensorCheck | None = None) -> Verdict:
    """Whether Pagewick loads and runs a checkpoint, judged by its headers, too, if `check_tensors` is given."""
    if not checkpoint.is_gguf:
        verdict = judge(checkpoint.config, [tensor.name for tensor in checkpoint.tensors])
        if verdict.runs and not checkpoint.is_only_described and not files.has_tokenizer(checkpoint.file_names):
            return Verdict(False, "there is no tokenizer.json; write it with transformers: save_pretrained")
        if verdict.runs and not checkpoint.is_only_described and check_tensors is not None:
            try:
                check_tensors(checkpoint.config, checkpoint.tensors)
            except PagewickError as error:
                return refusal(error)
        return verdict
    if gguf_header.IS_LOADABLE:
        return Verdict(True)
    return Verdict(False, "GGUF files are not supported yet; use the model's original repository, with *.safetensors")


def memory_of_weights(checkpoint: Checkpoint, num_parameters: int, wishes: Wishes) -> int:
    """Bytes of the weights once they are loaded: as they are stored if they are quantized, else in the dtype."""
    is_quantized = checkpoint.is_gguf or any(
        checkpoint.config.get(name) for name in ("quantization_config", "compression_config")
    )
    if is_quantized:
        return checkpoint.num_bytes
    return num_parameters * DTYPE_BYTES[wishes.dtype or checkpoint.shape.dtype]


def best_plan(checkpoint: Checkpoint, in_memory: int, device: Device, wishes: Wishes) -> Plan:
    """The plan for what the user wants; over as few GPUs of this machine as hold the model, if that is left open."""
    plan = make_plan(checkpoint.shape, in_memory, device, wishes)
    if wishes.tensor_parallel_size is not None or device.kind != "cuda":
        return plan
    for size in plan.tensor_parallel_sizes:
        if 1 < size <= device.count and too_small(plan):
            plan = make_plan(checkpoint.shape, in_memory, device, replace(wishes, tensor_parallel_size=size))
    return plan


def judge_plan(
    checkpoint: Checkpoint, verdict: Verdict, plan: Plan | None, in_memory: int, wishes: Wishes
) -> tuple[str, str]:
    """Why a model will not run here as it is wished, and what to do; both empty if it will."""
    if checkpoint.is_only_described and verdict.runs:
        return "there are no weights beside config.json", "download the model, or name it by its id on a hub"
    if not verdict.runs:
        return verdict.reason, f"the nearest that runs: {verdict.nearest}" if verdict.nearest else verdict.fix
    if plan is None:
        return f"its memory cannot be computed: {checkpoint.shape.other_cache}", ""
    if lacking := too_small(plan):
        return lacking, _advice(checkpoint, plan, in_memory)
    if wishes.max_model_len is not None and plan.fitting_context < wishes.max_model_len:
        needed = format_memory(plan.rows[-1].num_bytes)
        text = f"{wishes.max_model_len} tokens take {needed} of KV cache, and {format_memory(plan.kv_most)} are left"
        return text, f"use --max-model-len {plan.fitting_context}, or a smaller --kv-cache-dtype"
    return "", ""


def kv_bytes_per_token(checkpoint: Checkpoint) -> dict[str, float]:
    """Bytes of the whole KV cache per token, by the cache's dtype; of a long sequence, where windows are small."""
    return {
        dtype: sum(
            group.bytes_per_token for group in checkpoint.shape.cache_groups(block_size=BLOCK_SIZE, cache_dtype=dtype)
        )
        for dtype in CACHE_DTYPES
    }


def _advice(checkpoint: Checkpoint, plan: Plan, in_memory: int) -> str:
    """What would make a model fit that does not."""
    if plan.dtype == "float32":
        half = make_plan(checkpoint.shape, in_memory // 2, plan.device, Wishes(dtype="bfloat16"))
        if not too_small(half):
            return "use --dtype bfloat16, which takes half as much"
    if plan.device.kind == "cuda":
        sizes = [size for size in sizes_that_fit(checkpoint.shape, in_memory, plan.device) if size > 1]
        if sizes:
            return f"use {sizes[0]} such GPUs: --tensor-parallel-size {sizes[0]}"
    return "use a smaller model, or a machine with more memory"
