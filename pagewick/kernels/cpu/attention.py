"""Paged attention by the native library."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.library import BAD_BLOCK_ID, BAD_LENGTHS, DTYPES, NativeLibrary, check_out, is_plain

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class AttentionArgs(ctypes.Structure):
    """AttentionArgs in csrc/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_cache", "block_tables", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "num_blocks", "block_size", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("block_table_stride", "q_stride", "sliding_window")),
        ("softmax_scale", ctypes.c_float),
        ("logit_soft_cap", ctypes.c_float),
        ("q_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
    )


def has_paged_attention(q: Tensor, kv_cache: Tensor) -> bool:
    """Whether paged_attention is native for these tensors."""
    head_dim = q.shape[-1]
    return (
        q.dtype in DTYPES
        and kv_cache.dtype in DTYPES
        and head_dim % 8 == 0
        and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
        and is_plain(q)
    )


def paged_attention(
    library: NativeLibrary,
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """reference.paged_attention, written into `out` [T, H, D] (contiguous) if given.

    Raises ValueError for tensors that do not fit together, lengths that contradict each other and
    block ids outside the cache.
    """
    out = library.empty(q.shape, q.dtype) if out is None else out
    _check_attention(q, kv_cache, block_tables, context_lens, cu_seqlens_q, out)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    num_tokens, num_heads, head_dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    status = library.run(
        library.operation("paged_attention"),
        AttentionArgs(
            q.data_ptr(),
            kv_cache.data_ptr(),
            block_tables.data_ptr(),
            context_lens.data_ptr(),
            cu_seqlens_q.data_ptr(),
            out.data_ptr(),
            num_tokens,
            context_lens.shape[0],
            num_heads,
            kv_cache.shape[2],
            head_dim,
            kv_cache.shape[0],
            kv_cache.shape[3],
            block_tables.shape[1],
            block_tables.stride(0),
            q.stride(0),
            sliding_window or 0,
            softmax_scale,
            logit_soft_cap or 0.0,
            DTYPES[q.dtype],
            DTYPES[kv_cache.dtype],
        ),
    )
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block_tables and q contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the cache of {kv_cache.shape[0]} blocks")
    return out


def _check_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor,
) -> None:
    if q.dim() != 3 or kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            "expected q [T, H, D] and a contiguous kv_cache [num_blocks, 2, KVH, block_size, D], "
            f"not {list(q.shape)} and {list(kv_cache.shape)}"
        )
    if q.shape[2] != kv_cache.shape[4] or q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"heads of q {list(q.shape)} and kv_cache {list(kv_cache.shape)} do not fit")
    if q.dtype not in DTYPES or kv_cache.dtype not in DTYPES:
        raise ValueError(f"no native attention for {q.dtype} over {kv_cache.dtype}")
    head_dim = q.shape[2]
    if head_dim % 8 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"no native attention for a head size of {head_dim}")
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
    check_out(q, out)
