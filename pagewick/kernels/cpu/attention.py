"""Paged attention, and storing what it attends to, by the native library: on packed caches (../kv_cache.py)."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import BAD_BLOCK_ID, BAD_LENGTHS, DTYPES, NativeLibrary, check_out, is_plain
from pagewick.kernels.kv_cache import KVCache, can_pack, padded_head_dim


class AttentionArgs(ctypes.Structure):
    """AttentionArgs in csrc/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_cache", "block_tables", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "sinks", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "num_blocks", "block_size", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("block_table_stride", "q_stride", "sliding_window")),
        ("softmax_scale", ctypes.c_float),
        ("logit_soft_cap", ctypes.c_float),
        ("q_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
    )


class StoreKvArgs(ctypes.Structure):
    """StoreKvArgs in csrc/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "slot_mapping", "kv_cache")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_kv_heads", "head_dim", "num_blocks")),
        *((name, ctypes.c_int64) for name in ("block_size", "k_stride", "v_stride")),
        ("dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
    )


def is_native(x: Tensor, cache: KVCache) -> bool:
    """Whether the operations of this module take x, queries or keys, with this cache."""
    return cache.is_packed and x.dtype in DTYPES and is_plain(x)


def paged_attention(
    library: NativeLibrary,
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
    out: Tensor | None = None,
) -> Tensor:
    """reference.paged_attention over a packed cache, written into `out` [T, H, D] (contiguous) if given.

    With a bfloat16 cache, queries and the probabilities that weigh the values are rounded to bfloat16. The bits of a
    query's output depend on that query and the keys and values that it sees, and on the instruction set, alone.
    Raises ValueError for tensors that do not fit together, lengths that contradict each other and block ids outside
    the cache.
    """
    out = library.empty(q.shape, q.dtype) if out is None else out
    _check_attention(q, cache, block_tables, context_lens, cu_seqlens_q, sinks, out)
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be above 0, not {softmax_scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    q = _heads_together(q)
    args = AttentionArgs(
        q.data_ptr(), cache.data.data_ptr(), block_tables.data_ptr(), context_lens.data_ptr(),
        cu_seqlens_q.data_ptr(), None if sinks is None else sinks.data_ptr(), out.data_ptr(),
        q.shape[0], context_lens.shape[0], q.shape[1], cache.num_kv_heads,
        cache.head_dim, cache.num_blocks, cache.block_size, block_tables.shape[1],
        block_tables.stride(0), q.stride(0), sliding_window or 0,
        softmax_scale, logit_soft_cap or 0.0, DTYPES[q.dtype], DTYPES[cache.dtype],
    )  # fmt: skip
    status = library.run(library.operation("paged_attention"), args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block_tables and q contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the cache of {cache.num_blocks} blocks")
    return out


def store_kv(library: NativeLibrary, k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """reference.store_kv for a packed cache.

    Raises ValueError for tensors that do not fit together and slots outside the cache; nothing is stored then.
    """
    _check_packed(cache)
    shape = (len(slot_mapping), cache.num_kv_heads, cache.head_dim)
    if k.shape != shape or v.shape != shape or k.dtype not in DTYPES or v.dtype != k.dtype:
        raise ValueError(f"expected k and v {list(shape)} of a native dtype, not {list(k.shape)} and {list(v.shape)}")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous() or not slot_mapping.is_cpu:
        raise ValueError("slot_mapping must be int64 on the CPU with adjacent elements")
    k, v = _heads_together(k), _heads_together(v)
    args = StoreKvArgs(
        k.data_ptr(), v.data_ptr(), slot_mapping.data_ptr(), cache.data.data_ptr(),
        *shape, cache.num_blocks, cache.block_size, k.stride(0), v.stride(0), DTYPES[k.dtype], DTYPES[cache.dtype],
    )  # fmt: skip
    if library.run(library.operation("store_kv"), args) == BAD_BLOCK_ID:
        raise ValueError(f"slot_mapping names a slot outside the cache of {cache.num_blocks} blocks")


def _heads_together(x: Tensor) -> Tensor:
    """x [T, heads, D] with the heads of a token in adjacent elements; tokens may lie apart, as in a fused product."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _check_packed(cache: KVCache) -> None:
    data = cache.data
    if not cache.is_packed or data.dim() != 4 or data.shape[1] != 2 or not data.is_contiguous() or not data.is_cpu:
        raise ValueError(
            "expected a contiguous packed cache [num_blocks, 2, KVH, block_size * Dp] on the CPU, "
            f"not {list(data.shape)}"
        )
    if not can_pack(cache.head_dim, cache.block_size, cache.dtype) or data.shape[3] % padded_head_dim(cache.head_dim):
        raise ValueError(
            f"no native attention for a cache of {cache.dtype} with a head size of {cache.head_dim} and "
            f"{cache.block_size} keys a block"
        )


def _check_attention(
    q: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    _check_packed(cache)
    if q.dim() != 3 or q.shape[2] != cache.head_dim or q.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"expected q [T, H, D] for {cache.num_kv_heads} KV heads of size {cache.head_dim}, not {list(q.shape)}"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"no native attention for {q.dtype}")
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
    if sinks is not None and (
        sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32 or not sinks.is_contiguous() or not sinks.is_cpu
    ):
        raise ValueError("sinks must be float32 [H] on the CPU with adjacent elements")
    check_out(q, out)
