"""The choice of the tokens that sparse attention sees, by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference_index
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.cpu.binding import (
    BAD_BLOCK_ID,
    BAD_LENGTHS,
    DTYPES,
    Operation,
    address,
    check_metadata,
    empty,
    is_plain,
)
from pagewick.kernels.cpu.rope import check_rotation
from pagewick.kernels.cpu.structs import SelectKeysArgs, StoreIndexArgs
from pagewick.kernels.options import AttentionMetadata, Rotation, SelectedKeys

_STORE_INDEX_KEYS = Operation("store_index_keys", StoreIndexArgs)
_SELECT_KEYS = Operation("select_keys", SelectKeysArgs)


def store_index_keys(keys: Tensor, cache: Tensor, slot_mapping: Tensor, *, rotation: Rotation) -> None:
    """reference_index.store_index_keys.

    Raises ValueError for tensors that do not fit together, IndexError for a slot outside the cache.
    """
    if not _is_served(keys, cache):
        reference_index.store_index_keys(keys, cache, slot_mapping, rotation=rotation)
        return
    if keys.dim() != 2 or keys.stride(1) != 1 or keys.dtype not in DTYPES:
        raise ValueError(f"keys {keys.dtype} {list(keys.shape)} must be [T, I] of a native dtype")
    num_tokens, dim = keys.shape
    _check_rotation(num_tokens, dim, rotation)
    _check_cache(cache, dim)
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [{num_tokens}]")
    cos, sin, interleaved = rotation
    args = StoreIndexArgs(
        keys=keys.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), slot_mapping=slot_mapping.data_ptr(),
        cache=cache.data_ptr(), num_tokens=num_tokens, dim=dim, rope_dim=2 * cos.shape[-1], key_stride=keys.stride(0),
        angle_stride=cos.stride(0), num_blocks=cache.shape[0], block_size=cache.shape[1], dtype=DTYPES[keys.dtype],
        cache_dtype=DTYPES[cache.dtype], is_interleaved=interleaved,
    )  # fmt: skip
    if _STORE_INDEX_KEYS.run(args) == BAD_BLOCK_ID:
        raise IndexError(f"a slot is outside 0 .. {cache.shape[0] * cache.shape[1] - 1}")


def select_keys(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    tables: Tensor | None,
    *,
    rotation: Rotation,
    top_k: int,
    ratio: int = 1,
) -> SelectedKeys:
    """reference_index.select_keys.

    The tokens that a token sees depend on its own query and the keys before it, and on the instruction set, alone.
    Raises ValueError for tensors that do not fit together, lengths that contradict each other and block ids outside
    the cache.
    """
    if not _is_served(q, cache):
        return reference_index.select_keys(
            q, weights, cache, metadata, tables, rotation=rotation, top_k=top_k, ratio=ratio
        )
    if weights.shape != q.shape[:2] or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights must be contiguous float32 {list(q.shape[:2])}")
    if tables is not None and (
        tables.shape != metadata.block_tables.shape or tables.dtype != torch.int32 or tables.stride(-1) != 1
    ):
        raise ValueError(
            f"tables must be int32 {list(metadata.block_tables.shape)}, not {tables.dtype} {list(tables.shape)}"
        )
    return _select(q, weights, cache, metadata, tables, rotation, top_k, ratio)


def select_blocks(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, *, rotation: Rotation, choice: BlockChoice
) -> SelectedKeys:
    """reference_index.select_blocks; as select_keys."""
    if not _is_served(q, cache):
        return reference_index.select_blocks(q, cache, metadata, rotation=rotation, choice=choice)
    if not 1 <= choice.num_local <= choice.top_k:
        raise ValueError(f"num_local must be from 1 to top_k {choice.top_k}, not {choice.num_local}")
    return _select(q, None, cache, metadata, None, rotation, choice.top_k, choice.size, choice.num_local)


OPERATIONS = dict.fromkeys((store_index_keys, select_keys, select_blocks), DTYPES)


def _select(
    q: Tensor,
    weights: Tensor | None,
    cache: Tensor,
    metadata: AttentionMetadata,
    tables: Tensor | None,
    rotation: Rotation,
    top_k: int,
    ratio: int,
    num_local: int = 0,
) -> SelectedKeys:
    """Select keys by the sum of the heads' products, or, without weights, blocks of `ratio` keys for each head."""
    if q.dim() != 3 or q.stride()[1:] != (q.shape[2], 1) or q.dtype not in DTYPES or 0 in q.shape[1:]:
        raise ValueError(f"q {q.dtype} {list(q.shape)} must be [T, H, I] of a native dtype, heads together")
    num_tokens, num_heads, dim = q.shape
    _check_rotation(num_tokens, dim, rotation)
    _check_cache(cache, dim)
    check_metadata(metadata)
    block_tables, context_lens, cu_seqlens_q, *_ = metadata
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, not {ratio}")
    shape = (num_tokens, top_k) if weights is not None else (num_tokens, num_heads, top_k)
    selected = SelectedKeys(
        empty(shape, torch.int32),
        empty((num_tokens,), torch.int32),
        empty((num_tokens + 1,), torch.int32),
    )
    cos, sin, interleaved = rotation
    args = SelectKeysArgs(
        q=q.data_ptr(), weights=address(weights), cos=cos.data_ptr(), sin=sin.data_ptr(), cache=cache.data_ptr(),
        block_tables=block_tables.data_ptr(), target_tables=address(tables), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), slots=selected.slots.data_ptr(), counts=selected.counts.data_ptr(),
        starts=selected.starts.data_ptr(), num_tokens=num_tokens, num_seqs=len(context_lens), num_heads=num_heads,
        dim=dim, rope_dim=2 * cos.shape[-1], q_stride=q.stride(0), angle_stride=cos.stride(0),
        num_blocks=cache.shape[0], block_size=cache.shape[1], max_blocks=block_tables.shape[1],
        block_table_stride=block_tables.stride(0),
        target_table_stride=0 if tables is None else tables.stride(0), top_k=top_k, ratio=ratio,
        num_local=num_local, dtype=DTYPES[q.dtype], cache_dtype=DTYPES[cache.dtype], is_interleaved=interleaved,
        has_blocks=weights is None,
    )  # fmt: skip
    status = _SELECT_KEYS.run(args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block_tables and q contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the cache of {len(cache)} blocks")
    return selected


def _is_served(x: Tensor, cache: Tensor) -> bool:
    return cache.dtype in DTYPES and is_plain(x)


def _check_rotation(num_tokens: int, dim: int, rotation: Rotation) -> None:
    rope_dim = 2 * rotation.cos.shape[-1]
    if rope_dim > dim:
        raise ValueError(f"vectors of {dim} elements have no {rope_dim} to rotate")
    check_rotation(num_tokens, rope_dim, rotation)


def _check_cache(cache: Tensor, dim: int) -> None:
    if cache.dim() != 3 or cache.shape[2] != dim or not cache.is_contiguous():
        raise ValueError(f"cache {cache.dtype} {list(cache.shape)} must be contiguous [num_blocks, block_size, {dim}]")
