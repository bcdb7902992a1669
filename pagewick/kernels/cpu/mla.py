"""Multi-head latent attention, and storing of latents, by the native library."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import BAD_BLOCK_ID, BAD_LENGTHS, DTYPES, NativeLibrary, check_out, is_plain


class LatentAttentionArgs(ctypes.Structure):
    """LatentAttentionArgs in csrc/mla.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_latent", "q_rope", "cache", "block_tables", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_heads", "latent_dim", "rope_dim")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "block_size", "max_blocks", "block_table_stride")),
        ("softmax_scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype")),
    )


class StoreLatentArgs(ctypes.Structure):
    """StoreLatentArgs in csrc/mla.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "latents", "norm", "cos", "sin", "slot_mapping")),
        *((name, ctypes.c_void_p) for name in ("q_rope", "cache")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "nope_dim", "latent_dim", "rope_dim")),
        *((name, ctypes.c_int64) for name in ("q_stride", "latent_stride", "angle_stride", "num_blocks", "block_size")),
        ("norm_eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype", "is_interleaved")),
    )


def is_native(x: Tensor, cache: Tensor) -> bool:
    """Whether the operations of this module take x, queries or latents, with this cache."""
    return x.dtype in DTYPES and cache.dtype in DTYPES and is_plain(x)


def rope_and_store_latent(
    library: NativeLibrary,
    q: Tensor,
    latents: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    out: Tensor | None = None,
) -> Tensor:
    """reference_mla.rope_and_store_latent; the queries are written into `out` [T, H, R] (contiguous) if given.

    Raises ValueError for tensors that do not fit together, IndexError for a slot outside the cache.
    """
    latent_dim, rope_dim = len(norm_weight), 2 * cos.shape[-1]
    if q.dim() != 3 or q.shape[2] < rope_dim or q.stride()[1:] != (q.shape[2], 1) or q.dtype not in DTYPES:
        raise ValueError(
            f"q {q.dtype} {list(q.shape)} must be [T, H, N + {rope_dim}] of a native dtype, heads together"
        )
    num_tokens, num_heads, head_dim = q.shape
    if latents.shape != (num_tokens, latent_dim + rope_dim) or latents.dtype != q.dtype or latents.stride(1) != 1:
        raise ValueError(
            f"latents {latents.dtype} {list(latents.shape)} must be {q.dtype} {[num_tokens, latent_dim + rope_dim]}"
        )
    if norm_weight.dtype != q.dtype or norm_weight.dim() != 1 or not norm_weight.is_contiguous():
        raise ValueError(f"norm_weight must be contiguous {q.dtype} [L], not {norm_weight.dtype}")
    _check_angles(num_tokens, cos, sin)
    _check_cache(cache, latent_dim + rope_dim)
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [{num_tokens}]")
    out = library.empty((num_tokens, num_heads, rope_dim), q.dtype) if out is None else out
    check_out(q[..., :rope_dim], out)
    args = StoreLatentArgs(
        q.data_ptr(), latents.data_ptr(), norm_weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        slot_mapping.data_ptr(), out.data_ptr(), cache.data_ptr(), num_tokens, num_heads, head_dim - rope_dim,
        latent_dim, rope_dim, q.stride(0), latents.stride(0), cos.stride(0), cache.shape[0], cache.shape[1], norm_eps,
        DTYPES[q.dtype], DTYPES[cache.dtype], int(interleaved),
    )  # fmt: skip
    if library.run(library.operation("store_latent"), args) == BAD_BLOCK_ID:
        raise IndexError(f"a slot is outside 0 .. {cache.shape[0] * cache.shape[1] - 1}")
    return out


def latent_attention(
    library: NativeLibrary,
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """reference_mla.latent_attention, written into `out` [T, H, L] (contiguous) if given.

    With a bfloat16 cache, queries and the probabilities that weigh the latents are rounded to bfloat16. The bits of a
    query's output depend on that query and the latents that it sees, and on the instruction set, alone.
    Raises ValueError for tensors that do not fit together, lengths that contradict each other and block ids outside
    the cache.
    """
    out = library.empty(q_latent.shape, q_latent.dtype) if out is None else out
    _check_attention(q_latent, q_rope, cache, block_tables, context_lens, cu_seqlens_q, out)
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be above 0, not {softmax_scale}")
    args = LatentAttentionArgs(
        q_latent.data_ptr(), q_rope.data_ptr(), cache.data_ptr(), block_tables.data_ptr(), context_lens.data_ptr(),
        cu_seqlens_q.data_ptr(), out.data_ptr(), q_latent.shape[0], len(context_lens), q_latent.shape[1],
        q_latent.shape[2], q_rope.shape[2], cache.shape[0], cache.shape[1], block_tables.shape[1],
        block_tables.stride(0), softmax_scale, DTYPES[q_latent.dtype], DTYPES[cache.dtype],
    )  # fmt: skip
    status = library.run(library.operation("latent_attention"), args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block_tables and q_latent contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the cache of {len(cache)} blocks")
    return out


def _check_cache(cache: Tensor, size: int) -> None:
    if cache.dim() != 3 or cache.shape[2] != size or cache.dtype not in DTYPES or not cache.is_contiguous():
        raise ValueError(
            f"cache {cache.dtype} {list(cache.shape)} must be contiguous [num_blocks, block_size, {size}] "
            "of a native dtype"
        )


def _check_angles(num_tokens: int, cos: Tensor, sin: Tensor) -> None:
    shape = (num_tokens, cos.shape[-1])
    if cos.shape != shape or sin.shape != shape or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must be float32 [{num_tokens}, R / 2]")
    if cos.stride() != sin.stride() or (shape[1] > 1 and cos.stride(1) != 1):
        raise ValueError("rows of cos and sin must lie in one piece, both with the same stride")


def _check_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor,
) -> None:
    if q_latent.dim() != 3 or q_rope.shape[:-1] != q_latent.shape[:-1] or q_latent.shape[2] == 0:
        raise ValueError(
            f"q_latent {list(q_latent.shape)} and q_rope {list(q_rope.shape)} must be [T, H, L] and [T, H, R]"
        )
    if q_latent.dtype not in DTYPES or q_rope.dtype != q_latent.dtype:
        raise ValueError(f"no native latent attention for {q_latent.dtype} and {q_rope.dtype}")
    if not q_latent.is_contiguous() or not q_rope.is_contiguous():
        raise ValueError("q_latent and q_rope must be contiguous")
    _check_cache(cache, q_latent.shape[2] + q_rope.shape[2])
    num_seqs = context_lens.shape[0]
    if block_tables.dim() != 2 or len(block_tables) != num_seqs or cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError("expected block_tables [B, max_blocks], context_lens [B] and cu_seqlens_q [B + 1]")
    for name, tensor in (
        ("block_tables", block_tables),
        ("context_lens", context_lens),
        ("cu_seqlens_q", cu_seqlens_q),
    ):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1 or not tensor.is_cpu:
            raise ValueError(f"{name} must be int32 on the CPU with adjacent elements")
    check_out(q_latent, out)
