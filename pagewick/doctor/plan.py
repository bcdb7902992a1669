"""The memory that a model needs, and the memory that is left for its KV cache. Imports no torch.

    memory = weights + runtime + activations + KV cache + reserve

Weights and KV heads are divided among the ranks of tensor parallelism. Every GPU has its own memory; on a CPU the ranks
share one memory, and each has its own runtime. The engine gives the KV cache a share of the memory that is free after
the weights are loaded, or as much as --kv-cache-memory says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final, Literal

from pagewick.attention.cache_spec import (
    CACHE_DTYPES,
    CacheSpec,
    Kept,
    KeptState,
    can_keep,
    native_spec,
    state_spec,
)
from pagewick.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from pagewick.doctor.findings import format_memory
from pagewick.doctor.kept import kept_by
from pagewick.engine.step_memory import (
    CPU_BYTES,
    CPU_LOGIT_BYTES,
    StepLimits,
    activation_bytes,
    gpu_cache_bytes,
    gpu_step_bytes,
    max_num_logits,
)
from pagewick.models.config import ModelConfig
from pagewick.models.stages import stage_layers

# The engine's own numbers (engine.cache.kv_cache); tests compare them.
BLOCK_SIZE: Final = 32
CACHE_SHARE: Final = {"cpu": 0.6, "mps": 0.4}
RESERVED_BYTES: Final = 512 * 2**20
RESERVED_SHARE: Final = 0.05
MAX_NUM_SEQS: Final = 32

# Python, torch and its libraries in a rank: 212 and 241 MiB were measured on a CPU. On a GPU it is CUDA's context.
RUNTIME_BYTES: Final = {"cpu": 256 * 2**20, "mps": 256 * 2**20, "cuda": 512 * 2**20}
# Context lengths that the table shows, besides the model's own.
CONTEXTS: Final = (2048, 8192, 32768, 131072)

Kind = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True, slots=True)
class Device:
    """A place where a model would run. memory: free bytes of each GPU or of the machine. total: all of its bytes.

    is_planned: the user has said how much memory there is, and the engine may find more.
    """

    kind: Kind
    memory: int
    total: int
    count: int = 1
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """The user's decisions, and what the model's files decide; None leaves one to the planner.

    max_image_pixels: those of the largest picture that the model gets at once. num_draft_tokens: the most of a sequence
    in a step. pipeline_parallel_size: the number of stages, each with memory of its own: a machine's, or that of a GPU
    for each of its ranks.
    """

    max_model_len: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int | None = None
    max_num_seqs: int | None = None
    max_image_pixels: int | None = None
    num_draft_tokens: int = 0
    pipeline_parallel_size: int = 1


WeightsOf = Callable[[int], int]
"""number of ranks that share a layer -> bytes of the first rank's weights; no other rank has more."""

CanShare = Callable[[int], bool]
"""number of ranks -> whether they cut no block of quantized weights."""


@dataclass(frozen=True, slots=True)
class ContextRow:
    """num_bytes: KV cache of one sequence of num_tokens, in one memory. num_sequences: how many fit at once."""

    num_tokens: int
    num_bytes: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All bytes are of one memory: a GPU's, or the machine's.

    kv_default: the KV cache that the engine makes unless told otherwise. kv_most: the largest that fits. kv_chosen: the
    one planned with. fitting_context: tokens of the longest sequence that fits then, at most `context`; 0 if none does.
    wishes: the user's decisions. tensor_parallel_sizes: those that divide the heads and cut no block of weights.
    """

    device: Device
    wishes: Wishes
    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    tensor_parallel_sizes: tuple[int, ...]
    weights: int
    runtime: int
    activations: int
    reserve: int
    kv_bytes_per_token: float
    kv_default: int
    kv_most: int
    kv_chosen: int
    context: int
    fitting_context: int
    rows: tuple[ContextRow, ...]

    @property
    def needed(self) -> int:
        """Bytes without any KV cache."""
        return self.weights + self.runtime + self.activations + self.reserve

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags with which `pagewick serve` does what was planned."""
        wishes, size = self.wishes, self.wishes.tensor_parallel_size
        is_special = self.kv_chosen > self.kv_default or self.device.is_planned
        num_here = 1 if self.device.kind == "cuda" else self.tensor_parallel_size
        wished = {
            "--tensor-parallel-size": None if size == 1 else size,
            "--pipeline-parallel-size": None if wishes.pipeline_parallel_size == 1 else wishes.pipeline_parallel_size,
            "--dtype": wishes.dtype,
            "--kv-cache-dtype": wishes.kv_cache_dtype,
            "--max-num-seqs": wishes.max_num_seqs,
            "--max-model-len": self.fitting_context if self.fitting_context < self.context else wishes.max_model_len,
            "--kv-cache-memory": f"{-(-self.kv_chosen // num_here // 2**20)}MiB" if is_special else None,
        }
        return tuple(word for flag, value in wished.items() if value is not None for word in (flag, str(value)))

    @property
    def short_by(self) -> int:
        """Bytes that are missing even without a KV cache."""
        return max(0, self.needed - self.device.memory)

    @property
    def missing(self) -> str:
        """A sentence about the memory that is missing; empty if the model fits as the user wishes."""
        each = " on each GPU" if self.device.kind == "cuda" and self.tensor_parallel_size > 1 else ""
        if self.device.kind != "cuda" and self.wishes.pipeline_parallel_size > 1:
            each = " on each machine"
        if self.short_by:
            needed, there = format_memory(self.needed), format_memory(self.device.memory)
            return f"{needed} are needed{each}, and {there} are free: {format_memory(self.short_by)} are missing"
        wished = BLOCK_SIZE if self.fitting_context < BLOCK_SIZE else self.wishes.max_model_len or 0
        if self.fitting_context >= wished:
            return ""
        num_bytes = self.rows[-1].num_bytes if wished == self.context else self.kv_bytes_per_token * BLOCK_SIZE
        return (
            f"{wished:,} tokens take {format_memory(num_bytes)} of KV cache{each}, and {format_memory(self.kv_most)} "
            f"are left: {format_memory(num_bytes - self.kv_most)} are missing"
        )


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a rank that keep the same of a sequence."""

    spec: CacheSpec
    num_layers: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each further token takes: none in layers that keep one state of a sequence."""
        return 0.0 if self.spec.has_snapshots else self.spec.block_bytes * self.num_layers / self.spec.block_size


def cache_groups(model: ModelConfig, *, cache_dtype: str, num_ranks: int = 1, num_stages: int = 1) -> list[LayerGroup]:
    """Group the layers of one rank by what they keep, as the engine does. cache_dtype: a name in CACHE_DTYPES.

    With stages, the groups have as many layers as on the stage that has most of their kind.
    """
    stages = [model.layers[own.start : own.stop] for own in stage_layers(model, num_stages)]
    groups: Counter[KeptState | Kept] = Counter()
    for layers in [model.all_layers] if num_stages == 1 else stages:
        groups |= Counter(kept for layer in layers for kept in kept_by(layer, num_ranks))
    return [
        LayerGroup(
            state_spec(kept) if isinstance(kept, KeptState) else native_spec(kept, BLOCK_SIZE, cache_dtype), count
        )
        for kept, count in groups.items()
    ]


def cache_dtypes(model: ModelConfig) -> list[str]:
    """Return the names in CACHE_DTYPES that the KV cache of a model may have."""
    kept = {one for layer in model.layers for one in kept_by(layer, 1) if not isinstance(one, KeptState)}
    return [name for name in CACHE_DTYPES if all(can_keep(one, name) for one in kept)]


def tensor_parallel_sizes(model: ModelConfig, most: int, can_share: CanShare = lambda size: True) -> list[int]:
    """Numbers of ranks, up to `most`, that divide all heads and cut no block of weights."""
    unit = gcd(*model.divided.values())
    return [size for size in range(1, most + 1) if unit % size == 0 and can_share(size)]


def make_plan(model: ModelConfig, weights_of: WeightsOf, device: Device, wishes: Wishes) -> Plan:
    """Plan how a model would run. Raises ConfigError for impossible wishes."""
    size = wishes.tensor_parallel_size or 1
    model.check_ranks(size)
    EngineConfig(max_model_len=wishes.max_model_len).check_max_model_len(model.longest_context)
    dtype = wishes.dtype or model.dtype
    kv_dtype = wishes.kv_cache_dtype or dtype
    # On a CPU, all ranks share one memory.
    num_here = 1 if device.kind == "cuda" else size
    weights = weights_of(size) * num_here
    runtime = RUNTIME_BYTES[device.kind] * num_here
    activations = _activations(model, device.kind, dtype, wishes) * num_here
    reserve = max(RESERVED_BYTES, int(device.total * RESERVED_SHARE)) if device.kind == "cpu" else 0
    num_stages = wishes.pipeline_parallel_size
    groups = cache_groups(model, cache_dtype=kv_dtype, num_ranks=size, num_stages=num_stages)
    after_loading = max(0, device.memory - weights - runtime)
    default = (
        gpu_cache_bytes(after_loading, device.total, activations)
        if device.kind == "cuda"
        else int(after_loading * CACHE_SHARE[device.kind]) // num_here
    )
    most = max(0, after_loading - activations - reserve) // num_here
    default = min(default, most)
    context = wishes.max_model_len or model.max_position_embeddings
    wanted = cache_bytes(groups, context)
    chosen = default if wanted <= default else min(most, wanted)
    fitting = min(context, longest_context(groups, chosen, context))
    return Plan(
        device=device,
        wishes=wishes,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        tensor_parallel_size=size,
        tensor_parallel_sizes=tuple(tensor_parallel_sizes(model, max(16, size))),
        weights=weights,
        runtime=runtime,
        activations=activations,
        reserve=reserve,
        kv_bytes_per_token=sum(group.bytes_per_token for group in groups) * num_here,
        kv_default=default * num_here,
        kv_most=most * num_here,
        kv_chosen=chosen * num_here,
        context=context,
        fitting_context=fitting,
        rows=tuple(
            ContextRow(length, num_bytes * num_here, chosen // num_bytes)
            for length in (*(length for length in CONTEXTS if length < context), context)
            for num_bytes in (cache_bytes(groups, length),)
        ),
    )


def _activations(model: ModelConfig, kind: Kind, dtype: str, wishes: Wishes) -> int:
    """Return the bytes of the largest step of a rank, with the default token budget.

    On a CPU, numbers are counted as float32, because matrix products of 16 bits use such buffers. For Qwen3-0.6B this
    gives 141 MiB; measured: 134 MiB.
    """
    num_sequences = wishes.max_num_seqs or MAX_NUM_SEQS
    if kind == "cuda":
        config = EngineConfig(
            max_model_len=wishes.max_model_len,
            max_num_seqs=num_sequences,
            max_image_pixels=wishes.max_image_pixels,
            dtype=dtype,
            speculative_method="ngram" if wishes.num_draft_tokens else "none",
            num_speculative_tokens=wishes.num_draft_tokens or None,
        )
        return gpu_step_bytes(model, StepLimits.of(config, model), wishes.tensor_parallel_size or 1)
    num_tokens, context = DEFAULT_MAX_NUM_BATCHED_TOKENS, wishes.max_model_len or model.max_position_embeddings
    num_logits = max_num_logits(num_sequences, wishes.num_draft_tokens)
    if model.encoder is not None:
        # A step computes whole prompts, and no logits.
        num_tokens, num_logits = max(num_tokens, context), 0
    return activation_bytes(model, num_tokens, num_logits, CPU_BYTES, CPU_LOGIT_BYTES, context=context)


def cache_bytes(groups: Sequence[LayerGroup], num_tokens: int) -> int:
    """Bytes of one rank's KV cache for one sequence of `num_tokens`."""
    return sum(group.num_layers * group.spec.block_bytes * _num_blocks(group, num_tokens) for group in groups)


def longest_context(groups: Sequence[LayerGroup], num_bytes: int, most: int) -> int:
    """Tokens of the longest sequence, up to `most`, whose KV cache fits into `num_bytes` of one rank."""
    return bisect_right(range(1, most + 1), num_bytes, key=lambda num_tokens: cache_bytes(groups, num_tokens))


def _num_blocks(group: LayerGroup, num_tokens: int) -> int:
    """The most blocks that one sequence holds during a step: all, or those that a window and a step's chunk touch.

    A state takes two: the one before the step, and the one after it.
    """
    if group.spec.has_snapshots:
        return 2
    blocks = group.spec.num_blocks(num_tokens)
    if group.spec.lookback is None:
        return blocks
    return min(blocks, group.spec.num_blocks(group.spec.lookback + DEFAULT_MAX_NUM_BATCHED_TOKENS) + 1)


def best_plan(
    model: ModelConfig, weights_of: WeightsOf, device: Device, wishes: Wishes, can_share: CanShare = lambda size: True
) -> Plan:
    """The plan for the user's wishes, over as few GPUs of this machine as hold the model, unless the user sets it."""
    plan = make_plan(model, weights_of, device, wishes)
    is_free = device.kind == "cuda" and wishes.tensor_parallel_size is None
    for size in tensor_parallel_sizes(model, device.count, can_share)[1:] if is_free else []:
        if plan.missing:
            plan = make_plan(model, weights_of, device, replace(wishes, tensor_parallel_size=size))
    return plan


def sizes_that_fit(
    model: ModelConfig, weights_of: WeightsOf, device: Device, wishes: Wishes, can_share: CanShare = lambda size: True
) -> Iterator[int]:
    """Yield the numbers of GPUs like this one, above the number wished, whose memories together hold the model."""
    for size in tensor_parallel_sizes(model, 64, can_share):
        larger = replace(wishes, tensor_parallel_size=size)
        if size > (wishes.tensor_parallel_size or 1) and not make_plan(model, weights_of, device, larger).missing:
            yield size
