"""The operations, one signature each, dispatched by device: the table of contents of this package.

A CPU tensor goes to the native library where that is loaded and knows the operation and the dtype;
everything else runs `reference`, which is also the definition of every operation. `native_status()`
says in a sentence which of the two serves a CPU. `truncation` is plain PyTorch everywhere.
"""

from typing import Any

import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import cpu, reference
from pagewick.kernels.cpu import activation as native_activation
from pagewick.kernels.cpu import attention, elementwise, norm, rope
from pagewick.kernels.cpu import logits as native_logits
from pagewick.kernels.head_norm import HeadNorm
from pagewick.kernels.huge_pages import huge_zeros
from pagewick.kernels.kv_cache import LAYOUT_VERSION, KVCache, can_pack, plain_cache
from pagewick.kernels.mla import HeadMatrices, latent_attention, rope_and_store_latent
from pagewick.kernels.moe import Experts, combine, fused_moe, route
from pagewick.kernels.reference import Purpose
from pagewick.kernels.truncation import (
    mask_min_p,
    mask_surprise,
    mask_top_k_top_p,
    mask_top_n_sigma,
    mask_typical_p,
    mask_xtc,
    mirostat_top_k,
    surprise,
)

__all__ = [
    "Experts",
    "HeadMatrices",
    "HeadNorm",
    "KVCache",
    "Purpose",
    "Routing",
    "activation",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "argmax_rows",
    "combine",
    "dynamic_rotary_angles",
    "fused_moe",
    "gated_activation",
    "huge_zeros",
    "kv_layout_version",
    "latent_attention",
    "layer_norm",
    "log_softmax_stats",
    "mask_min_p",
    "mask_surprise",
    "mask_top_k_top_p",
    "mask_top_n_sigma",
    "mask_typical_p",
    "mask_xtc",
    "mirostat_top_k",
    "native_status",
    "packs_kv",
    "paged_attention",
    "philox_uniform",
    "plain_cache",
    "rms_norm",
    "rope_and_store",
    "rope_and_store_latent",
    "rotary_angles",
    "rotary_embedding",
    "route",
    "sample_tokens",
    "scale",
    "set_num_threads",
    "soft_cap",
    "store_kv",
    "surprise",
]


def native_status() -> str:
    """One sentence: which native kernels run, or why none do and what to do about it."""
    return cpu.status()


def kv_layout_version() -> str:
    """What changes whenever keys and values come to lie otherwise in a block: for what outlives a process."""
    return f"packed {LAYOUT_VERSION}" if cpu.library() else "plain"


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` threads, the calling one included, in native operations. No effect without them."""
    if native := cpu.library():
        native.set_num_threads(num_threads)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Normalise x [..., H] by its root mean square, scale by weight + weight_offset [H]. See reference.rms_norm."""
    if x.is_cpu and (native := cpu.library()) and norm.has_norm(x, weight):
        return norm.rms_norm(native, x, weight, eps, weight_offset)
    return reference.rms_norm(x, weight, eps, weight_offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual) for x, residual [..., H]."""
    if x.is_cpu and (native := cpu.library()) and norm.has_norm(x, weight):
        return norm.add_rms_norm(native, x, residual, weight, eps, weight_offset)
    return reference.add_rms_norm(x, residual, weight, eps, weight_offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Bring x [..., H] to mean 0 and variance 1, times weight [H], plus bias [H]. See reference.layer_norm."""
    if x.is_cpu and (native := cpu.library()) and norm.has_norm(x, weight):
        return norm.layer_norm(native, x, weight, bias, eps)
    return reference.layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual) for x, residual [..., H]."""
    if x.is_cpu and (native := cpu.library()) and norm.has_norm(x, weight):
        return norm.add_layer_norm(native, x, residual, weight, bias, eps)
    return reference.add_layer_norm(x, residual, weight, bias, eps)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, KVH, D] by cos, sin [T, rotary_dim / 2], half-split pairs."""
    return reference.rotary_embedding(q, k, cos, sin)


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] of positions [T] times frequencies [R / 2], times scale. See reference.rotary_angles."""
    if positions.is_cpu and (native := cpu.library()) and rope.has_rotary_angles(positions, frequencies):
        return rope.rotary_angles(native, positions, frequencies, scale)
    return reference.rotary_angles(positions, frequencies, scale)


def dynamic_rotary_angles(
    positions: Tensor, theta: float, rotary_dim: int, factor: float, original_max_position: int
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] of positions [T] with "dynamic NTK" frequencies. See reference.dynamic_rotary_angles."""
    scaling = (theta, rotary_dim, factor, original_max_position)
    if positions.is_cpu and (native := cpu.library()) and positions.dtype == torch.int64:
        return rope.dynamic_rotary_angles(native, positions, *scaling)
    return reference.dynamic_rotary_angles(positions, *scaling)


def rope_and_store(
    qkv: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
) -> Tensor:
    """Normalise and rotate the heads of qkv [T, (H + 2 KVH) * D], store keys and values, return q [T, H, D].

    See reference.rope_and_store. Raises ValueError for a packed cache where no native operation serves qkv.
    """
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "cos": cos,
        "sin": sin,
        "interleaved": interleaved,
        "q_norm": q_norm,
        "k_norm": k_norm,
    }
    if qkv.is_cpu and (native := cpu.library()) and rope.has_rope_and_store(qkv, cache):
        return rope.rope_and_store(native, qkv, cache, slot_mapping, **options)
    if cache.is_packed:
        raise ValueError(f"no native operation stores {qkv.dtype} in a packed cache")
    return reference.rope_and_store(qkv, cache.data, slot_mapping, **options)


def activation(x: Tensor, kind: str) -> Tensor:
    """The activation function `kind`, a name in reference.ACTIVATIONS, of each number of x, rounded once."""
    if x.is_cpu and (native := cpu.library()) and native_activation.has_activation(x):
        return native_activation.activation(native, x, kind)
    return reference.activation(x, kind)


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """activation(gate) * up for x [..., 2 * I] = (gate, up), rounded once; returns [..., I]."""
    if x.is_cpu and (native := cpu.library()) and native_activation.has_activation(x):
        return native_activation.gated_activation(native, x, kind)
    return reference.gated_activation(x, kind)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, both [..., H] of one dtype, rounded once."""
    if a.is_cpu and (native := cpu.library()) and elementwise.has_elementwise(a, b):
        return elementwise.add(native, a, b)
    return reference.add(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor for x [..., H], in float32, rounded once."""
    if x.is_cpu and (native := cpu.library()) and elementwise.has_elementwise(x):
        return elementwise.scale(native, x, factor)
    return reference.scale(x, factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) for x [..., H], in float32, rounded once. cap: above 0."""
    if x.is_cpu and (native := cpu.library()) and elementwise.has_elementwise(x):
        return elementwise.soft_cap(native, x, cap)
    return reference.soft_cap(x, cap)


def packs_kv(head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a cache on this device is to be packed (kv_cache.py): where native operations serve it."""
    return device.type == "cpu" and cpu.library() is not None and can_pack(head_dim, block_size, dtype)


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Write k, v [T, KVH, D] to slots [T] of a cache, slot = block_id * block_size + offset; -1 is skipped.

    Raises ValueError for a packed cache where no native operation serves k.
    """
    if k.is_cpu and (native := cpu.library()) and attention.is_native(k, cache):
        return attention.store_kv(native, k, v, cache, slot_mapping)
    if cache.is_packed:
        raise ValueError(f"no native operation stores {k.dtype} in a packed cache")
    return reference.store_kv(k, v, cache.data, slot_mapping)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a ragged batch q [T, H, D] over a paged cache. See reference.paged_attention.

    Raises ValueError for a packed cache where no native operation serves q.
    """
    metadata = (block_tables, context_lens, cu_seqlens_q)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "sinks": sinks,
    }
    if q.is_cpu and (native := cpu.library()) and attention.is_native(q, cache):
        return attention.paged_attention(native, q, cache, *metadata, **options)
    if cache.is_packed:
        raise ValueError(f"no native attention of {q.dtype} over a packed cache")
    return reference.paged_attention(q, cache.data, *metadata, **options)


def philox_uniform(seed: Tensor, choice_index: Tensor, position: Tensor, purpose: int) -> Tensor:
    """One uniform number in [0, 1) for each (seed, choice_index, position) [N] and purpose."""
    return reference.philox_uniform(seed, choice_index, position, purpose)


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id [N] int64 of the greatest of each row of logits [N, V] and itself [N]. See reference.argmax_rows."""
    if logits.is_cpu and (native := cpu.library()) and native_logits.has_rows(logits):
        return native_logits.argmax_rows(native, logits)
    return reference.argmax_rows(logits)


def log_softmax_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(max, log(sum(exp(logits - max)))), both [N], of logits [N, V] float32. See reference.log_softmax_stats."""
    if logits.is_cpu and (native := cpu.library()) and native_logits.has_rows(logits):
        return native_logits.log_softmax_stats(native, logits)
    return reference.log_softmax_stats(logits)


def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token id for each row of logits [N, V]; all parameters are [N]. See reference.sample_tokens."""
    if logits.is_cpu and (native := cpu.library()) and native_logits.has_rows(logits):
        return native_logits.sample_tokens(native, logits, temperature, top_k, top_p, uniform)
    return reference.sample_tokens(logits, temperature, top_k, top_p, uniform, argmax_rows)
