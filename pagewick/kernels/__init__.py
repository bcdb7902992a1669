"""The operations, one signature each, dispatched by device: the table of contents of this package.

A CPU tensor goes to the native library where that is loaded and knows the operation and the dtype;
everything else runs `reference`, which is also the definition of every operation. `native_status()`
says in a sentence which of the two serves a CPU. `truncation` is plain PyTorch everywhere.
"""

from typing import Any

from torch import Tensor

from pagewick.kernels import cpu, reference
from pagewick.kernels.cpu import attention, norm
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
    "Purpose",
    "add_rms_norm",
    "mask_min_p",
    "mask_surprise",
    "mask_top_k_top_p",
    "mask_top_n_sigma",
    "mask_typical_p",
    "mask_xtc",
    "mirostat_top_k",
    "native_status",
    "paged_attention",
    "philox_uniform",
    "rms_norm",
    "rotary_embedding",
    "sample_tokens",
    "set_num_threads",
    "silu_and_mul",
    "store_kv",
    "surprise",
]


def native_status() -> str:
    """One sentence: which native kernels run, or why none do and what to do about it."""
    return cpu.status()


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` threads, the calling one included, in native operations. No effect without them."""
    if native := cpu.library():
        native.set_num_threads(num_threads)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [..., H] by its root mean square and scale by weight [H]. See reference.rms_norm."""
    if x.is_cpu and (native := cpu.library()) and norm.has_rms_norm(x, weight):
        return norm.rms_norm(native, x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual) for x, residual [..., H]."""
    if x.is_cpu and (native := cpu.library()) and norm.has_rms_norm(x, weight):
        return norm.add_rms_norm(native, x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, H, D] and k [T, KVH, D] by cos, sin [T, rotary_dim / 2], half-split pairs."""
    return reference.rotary_embedding(q, k, cos, sin)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x [..., 2 * I] = (gate, up); returns [..., I]."""
    return reference.silu_and_mul(x)


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, KVH, D] to slots [T] of kv_cache [num_blocks, 2, KVH, block_size, D]; -1 is skipped."""
    reference.store_kv(k, v, kv_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
) -> Tensor:
    """Causal attention of a ragged batch q [T, H, D] over a paged cache. See reference.paged_attention."""
    arguments = (q, kv_cache, block_tables, context_lens, cu_seqlens_q)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
    }
    if q.is_cpu and (native := cpu.library()) and attention.has_paged_attention(q, kv_cache):
        return attention.paged_attention(native, *arguments, **options)
    return reference.paged_attention(*arguments, **options)


def philox_uniform(seed: Tensor, choice_index: Tensor, position: Tensor, purpose: int) -> Tensor:
    """One uniform number in [0, 1) for each (seed, choice_index, position) [N] and purpose."""
    return reference.philox_uniform(seed, choice_index, position, purpose)


def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token id for each row of logits [N, V]; all parameters are [N]. See reference.sample_tokens."""
    return reference.sample_tokens(logits, temperature, top_k, top_p, uniform)
