"""Paged attention, and storing of keys and values, by the native library, in packed caches (../kv_cache.py)."""

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import (
    BAD_BLOCK_ID,
    BAD_LENGTHS,
    CACHE_DTYPES,
    DTYPES,
    Operation,
    address,
    check_metadata,
    check_sinks,
    empty,
    is_plain,
)
from pagewick.kernels.cpu.structs import AttentionArgs, StoreKvArgs
from pagewick.kernels.kv_cache import KVCache, can_pack, has_layout, padded_head_dim, stored_size
from pagewick.kernels.options import AttentionMetadata, ScoreOptions

_PAGED_ATTENTION = Operation("paged_attention", AttentionArgs)
_STORE_KV = Operation("store_kv", StoreKvArgs)


def paged_attention(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scores: ScoreOptions) -> Tensor:
    """reference.paged_attention over a packed cache.

    With a bfloat16 cache, queries and the probabilities that weigh the values are rounded to bfloat16; so are, over
    8-bit numbers, queries and the products of probabilities and scales where the processor multiplies bfloat16. The
    bits of a query's output depend on that query and the keys and values that it sees, and on the instruction set,
    alone.
    Raises ValueError for tensors that do not fit together, lengths that contradict each other and block ids outside
    the cache.
    """
    if not (cache.is_packed and is_plain(q)):
        return reference.paged_attention(q, cache, metadata, scores)
    _check_attention(q, cache, metadata, scores)
    block_tables, context_lens, cu_seqlens_q, _, key_ends = metadata
    out = empty(q.shape, q.dtype)
    q = _heads_together(q)
    args = AttentionArgs(
        q=q.data_ptr(), kv_cache=cache.data.data_ptr(), block_tables=block_tables.data_ptr(),
        context_lens=context_lens.data_ptr(), cu_seqlens_q=cu_seqlens_q.data_ptr(), sinks=address(scores.sinks),
        key_ends=address(key_ends), out=out.data_ptr(), num_tokens=q.shape[0], num_seqs=context_lens.shape[0],
        num_heads=q.shape[1], num_kv_heads=cache.num_kv_heads, head_dim=cache.head_dim, num_blocks=cache.num_blocks,
        block_size=cache.block_size, max_blocks=block_tables.shape[1], block_table_stride=block_tables.stride(0),
        q_stride=q.stride(0), sliding_window=scores.sliding_window or 0, softmax_scale=scores.softmax_scale,
        logit_soft_cap=scores.logit_soft_cap or 0.0, q_dtype=DTYPES[q.dtype], kv_dtype=CACHE_DTYPES[cache.dtype],
        is_chunked=scores.is_chunked,
    )  # fmt: skip
    status = _PAGED_ATTENTION.run(args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, key_ends, block_tables and q contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the cache of {cache.num_blocks} blocks")
    return out


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """reference.store_kv for a packed cache.

    Raises ValueError for tensors that do not fit together and slots outside the cache; nothing is stored then.
    """
    if not (cache.is_packed and is_plain(k)):
        return reference.store_kv(k, v, cache, slot_mapping)
    check_packed(cache)
    shape = num_tokens, num_kv_heads, head_dim = (len(slot_mapping), cache.num_kv_heads, cache.head_dim)
    if k.shape != shape or v.shape != shape or k.dtype not in DTYPES or v.dtype != k.dtype:
        raise ValueError(f"expected k and v {list(shape)} of a native dtype, not {list(k.shape)} and {list(v.shape)}")
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous() or not slot_mapping.is_cpu:
        raise ValueError("slot_mapping must be int64 on the CPU with adjacent elements")
    k, v = _heads_together(k), _heads_together(v)
    args = StoreKvArgs(
        k=k.data_ptr(), v=v.data_ptr(), slot_mapping=slot_mapping.data_ptr(), kv_cache=cache.data.data_ptr(),
        num_tokens=num_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim, num_blocks=cache.num_blocks,
        block_size=cache.block_size, k_stride=k.stride(0), v_stride=v.stride(0), k_scale=cache.constant_scales[0],
        v_scale=cache.constant_scales[1], dtype=DTYPES[k.dtype], kv_dtype=CACHE_DTYPES[cache.dtype],
    )  # fmt: skip
    if _STORE_KV.run(args) == BAD_BLOCK_ID:
        raise ValueError(f"slot_mapping names a slot outside the cache of {cache.num_blocks} blocks")


OPERATIONS = dict.fromkeys((paged_attention, store_kv), DTYPES)


def _heads_together(x: Tensor) -> Tensor:
    """Return x [T, heads, D] with the heads of a token adjacent. Tokens may lie apart, as in a fused product."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def check_packed(cache: KVCache) -> None:
    """Raise ValueError for a cache that the library cannot read."""
    data = cache.data
    if not cache.is_packed or data.dim() != 4 or data.shape[1] != 2 or not has_layout(data, cache.scales):
        raise ValueError(
            "expected a contiguous packed cache [num_blocks, 2, KVH, block_size * Dp] on the CPU, "
            f"not {list(data.shape)}"
        )
    dim = stored_size(padded_head_dim(cache.head_dim), cache.dtype)
    if not can_pack(cache.head_dim, cache.block_size, cache.dtype) or data.shape[3] % dim:
        raise ValueError(
            f"no native attention for a cache of {cache.dtype} with a head size of {cache.head_dim} and "
            f"{cache.block_size} keys a block"
        )


def _check_attention(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scores: ScoreOptions) -> None:
    check_packed(cache)
    if q.dim() != 3 or q.shape[2] != cache.head_dim or q.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"expected q [T, H, D] for {cache.num_kv_heads} KV heads of size {cache.head_dim}, not {list(q.shape)}"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"no native attention for {q.dtype}")
    check_metadata(metadata)
    ends = metadata.key_ends
    if ends is not None and (
        ends.shape != q.shape[:1] or ends.dtype != torch.int32 or not ends.is_contiguous() or not ends.is_cpu
    ):
        raise ValueError("key_ends must be int32 [T] on the CPU with adjacent elements")
    check_sinks(scores.sinks, q.shape[1])
    if scores.softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be above 0, not {scores.softmax_scale}")
    if scores.sliding_window is not None and scores.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {scores.sliding_window}")
