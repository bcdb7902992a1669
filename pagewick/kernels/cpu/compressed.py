"""Compressed entries, and attention to a window and to them, or to selected blocks, by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference_blocks, reference_compressed
from pagewick.kernels.cpu.binding import (
    BAD_BLOCK_ID,
    BAD_LENGTHS,
    DTYPES,
    Operation,
    address,
    check_metadata,
    check_sinks,
    empty,
    is_plain,
)
from pagewick.kernels.cpu.rope import check_rotation
from pagewick.kernels.cpu.structs import BlockAttentionArgs, CompressRowsArgs, WindowAttentionArgs
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import AttentionMetadata, CompressOptions, Entries, Rotation, ScoreOptions, SelectedKeys

_COMPRESS_ROWS = Operation("compress_rows", CompressRowsArgs)
_WINDOW_ATTENTION = Operation("window_attention", WindowAttentionArgs)
_BLOCK_ATTENTION = Operation("block_attention", BlockAttentionArgs)


def compress_rows(
    rows: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    metadata: AttentionMetadata,
    entries: Tensor,
    entry_slots: Tensor,
    *,
    rotation: Rotation,
    options: CompressOptions,
) -> None:
    """reference_compressed.compress_rows.

    Raises ValueError for tensors that do not fit together and lengths that contradict each other, IndexError for slots
    and block ids outside the caches.
    """
    norm = options.norm_weight
    if not all(x.dtype in DTYPES and is_plain(x) for x in (rows, cache, entries, norm)):
        reference_compressed.compress_rows(
            rows, cache, slot_mapping, metadata, entries, entry_slots, rotation=rotation, options=options
        )
        return
    num_tokens, dim = len(rows), len(norm)
    row_size = (4 if options.overlaps else 2) * dim
    if rows.shape != (num_tokens, row_size) or rows.stride(1) != 1:
        raise ValueError(f"rows {list(rows.shape)} must be {[num_tokens, row_size]}, each in one piece")
    _check_cache("cache", cache, row_size)
    _check_cache("entries", entries, dim)
    for slots in (slot_mapping, entry_slots):
        if slots.shape != (num_tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
            raise ValueError(f"slots {slots.dtype} {list(slots.shape)} must be contiguous int64 [{num_tokens}]")
    bias = options.bias
    if bias.shape != (options.ratio, row_size // 2) or bias.dtype != torch.float32 or not bias.is_contiguous():
        raise ValueError(f"bias {list(bias.shape)} must be contiguous float32 {[options.ratio, row_size // 2]}")
    if not norm.is_contiguous():
        raise ValueError("norm_weight must be contiguous")
    check_metadata(metadata)
    rope_dim, angle_stride = check_rotation(num_tokens, dim, rotation)
    block_tables, context_lens, cu_seqlens_q, *_ = metadata
    args = CompressRowsArgs(
        rows=rows.data_ptr(), slot_mapping=slot_mapping.data_ptr(), entry_slots=entry_slots.data_ptr(),
        block_tables=block_tables.data_ptr(), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr(),
        bias=bias.data_ptr(), norm_weight=norm.data_ptr(), cache=cache.data_ptr(), entries=entries.data_ptr(),
        num_tokens=num_tokens, num_seqs=len(context_lens), dim=dim, rope_dim=rope_dim, ratio=options.ratio,
        row_stride=rows.stride(0), angle_stride=angle_stride, num_blocks=cache.shape[0], block_size=cache.shape[1],
        max_blocks=block_tables.shape[1], block_table_stride=block_tables.stride(0), num_entry_blocks=entries.shape[0],
        entry_block_size=entries.shape[1], norm_eps=options.norm_eps, dtype=DTYPES[rows.dtype],
        norm_dtype=DTYPES[norm.dtype], cache_dtype=DTYPES[cache.dtype], entry_dtype=DTYPES[entries.dtype],
        has_overlap=options.overlaps, is_interleaved=rotation.interleaved,
    )  # fmt: skip
    status = _COMPRESS_ROWS.run(args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block_tables and rows contradict each other")
    if status == BAD_BLOCK_ID:
        raise IndexError(f"a slot or a block lies outside the caches of {len(cache)} and {len(entries)} blocks")


def window_attention(
    q: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scores: ScoreOptions,
    entries: Entries | None = None,
) -> Tensor:
    """reference_compressed.window_attention.

    With a bfloat16 cache, queries and the probabilities that weigh the keys are rounded to bfloat16. The bits of a
    query's output depend on that query and the keys that it sees, and on the instruction set, alone.
    Raises ValueError for tensors that do not fit together, lengths that contradict each other, and block ids and slots
    outside the caches.
    """
    is_served = q.dtype in DTYPES and cache.dtype in DTYPES and is_plain(q) and q.numel() > 0
    if not is_served or (entries is not None and entries.cache.dtype != cache.dtype):
        return reference_compressed.window_attention(q, cache, metadata, scores, entries)
    assert scores.sliding_window is not None and scores.sinks is not None, "such layers have both"
    assert scores.logit_soft_cap is None and not scores.is_chunked, "no such layer has either"
    if q.dim() != 3 or not q.is_contiguous():
        raise ValueError(f"q {list(q.shape)} must be contiguous [T, H, D]")
    num_tokens, num_heads, dim = q.shape
    _check_cache("cache", cache, dim)
    check_metadata(metadata)
    check_sinks(scores.sinks, num_heads)
    if scores.softmax_scale <= 0 or scores.sliding_window < 1:
        raise ValueError(f"softmax_scale {scores.softmax_scale} and window {scores.sliding_window} must be above 0")
    block_tables, context_lens, cu_seqlens_q, *_ = metadata
    entry_cache, tables, ratio, selected = _checked(entries, num_tokens, len(context_lens), dim)
    out = empty(q.shape, q.dtype)
    args = WindowAttentionArgs(
        q=q.data_ptr(), cache=cache.data_ptr(), entries=address(entry_cache), block_tables=block_tables.data_ptr(),
        context_lens=context_lens.data_ptr(), cu_seqlens_q=cu_seqlens_q.data_ptr(), entry_tables=address(tables),
        slots=None if selected is None else selected.slots.data_ptr(),
        counts=None if selected is None else selected.counts.data_ptr(), sinks=address(scores.sinks),
        out=out.data_ptr(),
        num_tokens=num_tokens, num_seqs=len(context_lens), num_heads=num_heads, dim=dim, window=scores.sliding_window,
        ratio=ratio, top_k=0 if selected is None else selected.slots.shape[1], num_blocks=cache.shape[0],
        block_size=cache.shape[1], max_blocks=block_tables.shape[1], block_table_stride=block_tables.stride(0),
        num_entry_blocks=0 if entry_cache is None else entry_cache.shape[0],
        entry_block_size=1 if entry_cache is None else entry_cache.shape[1],
        max_entry_blocks=0 if tables is None else tables.shape[1],
        entry_table_stride=0 if tables is None else tables.stride(0), softmax_scale=scores.softmax_scale,
        dtype=DTYPES[q.dtype], cache_dtype=DTYPES[cache.dtype],
    )  # fmt: skip
    status = _WINDOW_ATTENTION.run(args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block tables, counts and q contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError("a block or a slot lies outside the caches")
    return out


def block_attention(
    q: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scores: ScoreOptions,
    selected: SelectedKeys,
    ratio: int,
) -> Tensor:
    """reference_blocks.block_attention.

    Rounding, and what the bits of a query depend on, are those of window_attention. Raises ValueError for tensors that
    do not fit together, lengths that contradict each other, and blocks outside the cache or behind a token.
    """
    is_served = q.dtype in DTYPES and cache.dtype in DTYPES and is_plain(q) and q.numel() > 0
    if not is_served or cache.is_packed or not cache.data.is_contiguous():
        return reference_blocks.block_attention(q, cache, metadata, scores, selected, ratio)
    num_kv_heads, slots = cache.num_kv_heads, selected.slots
    if q.dim() != 3 or not q.is_contiguous() or q.shape[2] != cache.head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(f"q {list(q.shape)} must be contiguous [T, multiple of {num_kv_heads}, {cache.head_dim}]")
    num_tokens, num_heads, dim = q.shape
    check_metadata(metadata)
    _check_selected(selected, num_tokens)
    num_selections = slots.shape[1] if slots.dim() == 3 else 1
    if num_selections not in (1, num_kv_heads):
        raise ValueError(f"slots {list(slots.shape)} must be of all KV heads, or of each of {num_kv_heads}")
    if scores.softmax_scale <= 0 or ratio < 1:
        raise ValueError(f"softmax_scale {scores.softmax_scale} and ratio {ratio} must be above 0")
    block_tables, context_lens, cu_seqlens_q, *_ = metadata
    out = empty(q.shape, q.dtype)
    args = BlockAttentionArgs(
        q=q.data_ptr(), cache=cache.data.data_ptr(), block_tables=block_tables.data_ptr(),
        context_lens=context_lens.data_ptr(), cu_seqlens_q=cu_seqlens_q.data_ptr(), slots=slots.data_ptr(),
        counts=selected.counts.data_ptr(), out=out.data_ptr(), num_tokens=num_tokens, num_seqs=len(context_lens),
        num_heads=num_heads, num_kv_heads=num_kv_heads, num_selections=num_selections, dim=dim, ratio=ratio,
        top_k=slots.shape[-1], num_blocks=cache.num_blocks, block_size=cache.block_size,
        max_blocks=block_tables.shape[1], block_table_stride=block_tables.stride(0),
        softmax_scale=scores.softmax_scale, dtype=DTYPES[q.dtype], cache_dtype=DTYPES[cache.dtype],
    )  # fmt: skip
    status = _BLOCK_ATTENTION.run(args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block tables, counts and q contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError("a block lies outside the cache, or ends behind the token that is to see it")
    return out


OPERATIONS = dict.fromkeys((compress_rows, window_attention, block_attention), DTYPES)


def _checked(
    entries: Entries | None, num_tokens: int, num_seqs: int, dim: int
) -> tuple[Tensor | None, Tensor | None, int, SelectedKeys | None]:
    """Return the fields of entries. Raises ValueError if they do not fit."""
    if entries is None:
        return None, None, 1, None
    cache, tables, ratio, selected = entries
    _check_cache("entries", cache, dim)
    if tables.dim() != 2 or len(tables) != num_seqs or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(f"the entries' block_tables must be int32 [{num_seqs}, max_blocks], not {list(tables.shape)}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, not {ratio}")
    if selected is not None:
        _check_selected(selected, num_tokens)
    return cache, tables, ratio, selected


def _check_selected(selected: SelectedKeys, num_tokens: int) -> None:
    slots, counts, _ = selected
    if len(slots) != num_tokens or slots.dtype != torch.int32 or not slots.is_contiguous():
        raise ValueError(f"slots {slots.dtype} {list(slots.shape)} must be contiguous int32 [{num_tokens}, top_k]")
    if counts.shape != (num_tokens,) or counts.dtype != torch.int32 or not counts.is_contiguous():
        raise ValueError(f"counts {counts.dtype} {list(counts.shape)} must be contiguous int32 [{num_tokens}]")


def _check_cache(name: str, cache: Tensor, size: int) -> None:
    if cache.dim() != 3 or cache.shape[2] != size or not cache.is_contiguous():
        raise ValueError(f"{name} {list(cache.shape)} must be contiguous [num_blocks, rows of a block, {size}]")
