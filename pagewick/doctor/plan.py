"""What a model needs of a machine's memory, and what is left for its KV cache. Imports no torch.

    memory = weights + runtime + activations + KV cache + reserve

Weights and KV heads are divided among the ranks of tensor parallelism. Every GPU has a memory of its own; on a CPU the
ranks share one, and each has its own runtime. The engine gives the KV cache a share of what is free once the weights
are loaded, or what --kv-cache-memory says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pagewick.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from pagewick.doctor.findings import format_memory
from pagewick.doctor.shape import LayerGroup, ModelShape
from pagewick.errors import ConfigError

# The engine's own numbers (engine.model_loading, engine.cache.kv_cache); tests compare them.
BLOCK_SIZE: Final = 32
CACHE_SHARE: Final = {"cpu": 0.6, "mps": 0.4, "cuda": 0.85}
RESERVED_BYTES: Final = 512 * 2**20
RESERVED_SHARE: Final = 0.05
MAX_NUM_SEQS: Final = 32

# Python, torch and its libraries in a rank: 212 and 241 MiB measured on a CPU. On a GPU, CUDA's context.
RUNTIME_BYTES: Final = {"cpu": 256 * 2**20, "mps": 256 * 2**20, "cuda": 512 * 2**20}
# Contexts to show; the model's own is added.
CONTEXTS: Final = (2048, 8192, 32768, 131072)

Kind = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model would run. memory: bytes that are free, of each GPU or of the machine. total: all of it.

    sees_more: the engine would take more to be free, as it does not know of the limit.
    """

    kind: Kind
    memory: int
    total: int
    count: int = 1
    sees_more: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user has decided; None is for us to decide."""

    max_model_len: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int | None = None


@dataclass(frozen=True, slots=True)
class ContextRow:
    """num_bytes: of one sequence of so many tokens in one memory. num_sequences: that fit at once."""

    num_tokens: int
    num_bytes: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes are of one memory: a GPU's, or the machine's.

    kv_default: what the engine gives the cache unless told otherwise. kv_most: what it could have. kv_chosen: what is
    planned with. fitting_context: tokens of one sequence that fit then, at most the model's context; 0 if none do.
    short_by: bytes that are lacking even without a KV cache. tensor_parallel_sizes: those that divide the heads.
    """

    device: Device
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
    flags: tuple[str, ...]

    @property
    def needed(self) -> int:
        """Without any KV cache."""
        return self.weights + self.runtime + self.activations + self.reserve

    @property
    def short_by(self) -> int:
        return max(0, self.needed - self.device.memory)


def make_plan(shape: ModelShape, weight_bytes: int, device: Device, wishes: Wishes) -> Plan:
    """How a model of `weight_bytes`, as it lies in memory, would run. Raises ConfigError for wishes that cannot be."""
    size = wishes.tensor_parallel_size or 1
    sizes = shape.tensor_parallel_sizes(max(16, size))
    if size not in sizes:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not divide the model's {shape.num_heads} attention heads; sizes that "
            f"work: {', '.join(map(str, sizes))}"
        )
    if wishes.max_model_len is not None and wishes.max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {wishes.max_model_len} is longer than the model's context of "
            f"{shape.max_position_embeddings} tokens"
        )
    dtype = wishes.dtype or shape.dtype
    kv_dtype = wishes.kv_cache_dtype or dtype
    # On a CPU, all ranks are in one memory.
    num_here = 1 if device.kind == "cuda" else size
    weights = -(-weight_bytes * num_here // size)
    runtime = RUNTIME_BYTES[device.kind] * num_here
    activations = activation_bytes(shape) * num_here
    reserve = max(RESERVED_BYTES, int(device.total * RESERVED_SHARE)) if device.kind == "cpu" else 0
    groups = shape.cache_groups(block_size=BLOCK_SIZE, cache_dtype=kv_dtype, tensor_parallel_size=size)
    after_loading = max(0, device.memory - weights - runtime)
    default = int(after_loading * CACHE_SHARE[device.kind]) // num_here
    most = max(0, after_loading - activations - reserve) // num_here
    default = min(default, most)
    context = wishes.max_model_len or shape.max_position_embeddings
    wanted = cache_bytes(groups, context)
    chosen = default if wanted <= default else min(most, wanted)
    fitting = min(context, longest_context(groups, chosen, context))
    return Plan(
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        tensor_parallel_size=size,
        tensor_parallel_sizes=tuple(sizes),
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
        rows=_rows(groups, chosen, context, num_here),
        flags=_flags(wishes, device, context, fitting, chosen, default),
    )


def cache_bytes(groups: Sequence[LayerGroup], num_tokens: int) -> int:
    """KV cache of one rank for one sequence of so many tokens."""
    return sum(group.num_layers * group.spec.block_bytes * _num_blocks(group, num_tokens) for group in groups)


def longest_context(groups: Sequence[LayerGroup], num_bytes: int, most: int) -> int:
    """Tokens of the longest sequence, up to `most`, whose KV cache fits into so many bytes of one rank."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cache_bytes(groups, middle) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def activation_bytes(shape: ModelShape) -> int:
    """What a step of the default token budget needs at its widest place, and logits for every sequence; an estimate.

    The widest place is the MLP or the attention, beside four tensors of hidden states; all are counted in float32, as
    matrix products of 16 bits use such buffers. For Qwen3-0.6B this gives 141 MiB; on a CPU, 134 MiB were measured.
    """
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if shape.kv_lora_rank:  # queries and outputs as latents, for each head
        attention = shape.num_heads * 2 * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    widest = 4 * shape.hidden_size + max(attention, 3 * shape.intermediate_size)
    return 4 * (DEFAULT_MAX_NUM_BATCHED_TOKENS * widest + 2 * MAX_NUM_SEQS * shape.vocab_size)


def _num_blocks(group: LayerGroup, num_tokens: int) -> int:
    """Blocks that one sequence holds at most during a step: all, or those that a window and a step's chunk touch."""
    blocks = group.spec.num_blocks(num_tokens)
    if group.spec.lookback is None:
        return blocks
    return min(blocks, group.spec.num_blocks(group.spec.lookback + DEFAULT_MAX_NUM_BATCHED_TOKENS) + 1)


def _rows(groups: Sequence[LayerGroup], num_bytes: int, context: int, num_here: int) -> tuple[ContextRow, ...]:
    lengths = [*(length for length in CONTEXTS if length < context), context]
    rows = []
    for length in lengths:
        needed = cache_bytes(groups, length)
        rows.append(ContextRow(length, needed * num_here, num_bytes // needed))
    return tuple(rows)


def _flags(wishes: Wishes, device: Device, context: int, fitting: int, chosen: int, default: int) -> tuple[str, ...]:
    """What to add to `pagewick serve MODEL` so that it does what was planned."""
    flags = []
    if wishes.tensor_parallel_size is not None and wishes.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(wishes.tensor_parallel_size)]
    if wishes.dtype is not None:
        flags += ["--dtype", wishes.dtype]
    if wishes.kv_cache_dtype is not None:
        flags += ["--kv-cache-dtype", wishes.kv_cache_dtype]
    if wishes.max_model_len is not None or fitting < context:
        flags += ["--max-model-len", str(fitting if fitting < context else context)]
    if chosen > default or device.sees_more:
        flags += ["--kv-cache-memory", f"{math.ceil(chosen / 2**20)}MiB"]
    return tuple(flags)


def sizes_that_fit(shape: ModelShape, weight_bytes: int, device: Device) -> list[int]:
    """Numbers of GPUs like this one, above the planned one, whose memories together hold the model."""
    return [
        size
        for size in shape.tensor_parallel_sizes(64)
        if make_plan(shape, weight_bytes, device, Wishes(tensor_parallel_size=size)).fitting_context >= BLOCK_SIZE
    ]


def too_small(plan: Plan) -> str:
    """One sentence about what is lacking; empty if the model fits."""
    if plan.short_by:
        return f"{format_memory(plan.needed)} are needed, and {format_memory(plan.device.memory)} are free"
    if plan.fitting_context < BLOCK_SIZE:
        return f"after the weights, {format_memory(plan.kv_most)} are left, too little for a KV cache"
    return ""
