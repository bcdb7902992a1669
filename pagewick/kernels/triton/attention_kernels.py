"""The kernels of paged attention; attention.py says how they divide the work, and launches them."""

import triton
import triton.language as tl

from pagewick.kernels.triton.cache_numbers import rotate_rows
from pagewick.kernels.triton.online_softmax import (
    converted,
    decoded,
    decoded_pairs,
    first_seen_key,
    next_weights,
    row_of,
    with_sink,
)


@triton.jit
def attend_rows(
    q, cache, scales, key_ends, table, first_row, num_rows, first_query, first_key, end_key, q_len, context_len,
    kv_head, num_kv_heads, group, q_stride, block_stride, scale_stride, block_shift, window, is_chunked, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STORED_AS: tl.constexpr, HAS_CAP: tl.constexpr, DOT: tl.constexpr, VALUE_DOT: tl.constexpr,
):  # fmt: skip
    """Attend with rows first_row .. of a sequence, whose first new token is first_query, to keys first_key .. end_key.

    key_ends: as in AttentionMetadata; None: each token sees the keys up to its own.

    Returns (acc [M, BLOCK_D], m [M], l [M], tokens [M], heads [M], is_row [M]); tokens count from first_query.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    tokens = tl.where(is_row, rows // group, 0)
    heads = kv_head * group + rows % group
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    q_address = (first_query + tokens).to(tl.int64)[:, None] * q_stride + heads[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q + q_address, mask=is_row[:, None] & is_dim[None, :], other=0)
    if STORED_AS == "int4":
        queries = rotate_rows(queries.to(tl.float32), BLOCK_M, BLOCK_D, HEAD_DIM & -HEAD_DIM)
    queries = converted(queries, DOT)
    positions = context_len - q_len + tokens
    first_position = context_len - q_len + first_row // group
    last_position = context_len - q_len + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // group
    # The blocks of earlier keys may belong to another sequence by now.
    first_seen = first_seen_key(first_position, window, is_chunked)
    first_keys = first_seen_key(positions, window, is_chunked)
    begin = tl.maximum(first_key, first_seen // BLOCK_N * BLOCK_N)
    if key_ends is None:
        end = tl.minimum(end_key, last_position + 1)
    else:
        ends = tl.load(key_ends + first_query + tokens, mask=is_row, other=0)
        end = tl.minimum(end_key, tl.max(ends, 0))
    block_size = 1 << block_shift
    # The bytes of two numbers of 4 bits are the elements of such a cache.
    ROW: tl.constexpr = HEAD_DIM // 2 if STORED_AS == "int4" else HEAD_DIM
    elements = tl.arange(0, BLOCK_D // 2) if STORED_AS == "int4" else d
    is_element = elements < ROW
    keys = cache + kv_head * (ROW * block_size)
    values = cache + (num_kv_heads + kv_head) * (ROW * block_size)
    factor = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = (n >= first_seen) & (n < end)
        block_ids = tl.load(table + (n >> block_shift), mask=exists, other=0).to(tl.int64)
        offsets = n & (block_size - 1)
        address = (block_ids * block_stride + offsets * ROW)[:, None] + elements[None, :]
        is_stored = exists[:, None] & is_element[None, :]
        k = tl.load(keys + address, mask=is_stored, other=0)
        k = decoded_pairs(k, DOT) if STORED_AS == "int4" else decoded(k, STORED_AS, DOT)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if scales is not None:
            scale_address = scales + block_ids * scale_stride + offsets
            key_scales = tl.load(scale_address + kv_head * block_size, mask=exists, other=0.0)
            value_scales = tl.load(scale_address + (num_kv_heads + kv_head) * block_size, mask=exists, other=0.0)
            scores *= key_scales[None, :]
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            grown = tl.exp2(scores * (2.0 * 1.4426950408889634 * scale / cap))
            scores = cap * (1.0 - 2.0 / (grown + 1.0))
        if key_ends is None:
            is_seen = (n[None, :] <= positions[:, None]) & (n[None, :] >= first_keys[:, None])
        else:
            is_seen = (n[None, :] < ends[:, None]) & (n[None, :] >= first_keys[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        weights, correction, m, total = next_weights(scores, factor, m, total)
        if scales is not None:
            weights *= value_scales[None, :]
        v = tl.load(values + address, mask=is_stored, other=0)
        v = decoded_pairs(v, VALUE_DOT) if STORED_AS == "int4" else decoded(v, STORED_AS, VALUE_DOT)
        acc = tl.dot(weights.to(VALUE_DOT), v, acc * correction[:, None], input_precision="ieee")
    if STORED_AS == "int4":
        acc = rotate_rows(acc, BLOCK_M, BLOCK_D, HEAD_DIM & -HEAD_DIM)
    return acc, m, total, tokens, heads, is_row


@triton.jit
def find_sequence(cu_seqlens_q, tile, num_seqs, group, BLOCK_M: tl.constexpr):
    """Return the sequence of a tile: the last one whose first tile does not come after it.

    The tiles of sequence b are those from cu_seqlens_q[b] * group // BLOCK_M + b on: at most one more than it needs.
    """
    seq, behind = 0, num_seqs
    while behind - seq > 1:
        middle = (seq + behind) // 2
        first_tile = tl.load(cu_seqlens_q + middle) * group // BLOCK_M + middle
        seq = tl.where(first_tile <= tile, middle, seq)
        behind = tl.where(first_tile <= tile, behind, middle)
    return seq


# Numbers that vary; those that do not are multiples of 16.
_NUMBERS = [
    "num_seqs", "num_kv_heads", "group", "table_stride", "scale_stride", "block_shift", "window", "is_chunked",
    "num_sinks", "max_short", "num_tiles", "first_seq", "row_unit", "num_splits",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def attend_short(
    q, cache, scales, key_ends, block_tables, context_lens, cu_seqlens_q, sinks, out, parts, stats,
    num_kv_heads, group, q_stride, table_stride, block_stride, scale_stride, block_shift, window, is_chunked,
    num_sinks, max_short,
    num_tiles, first_seq, row_unit, num_splits, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    STORED_AS: tl.constexpr, HAS_CAP: tl.constexpr, DOT: tl.constexpr, VALUE_DOT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a short sequence to a split of its keys.

    One program for each sequence from first_seq on, tile and KV head, and split. parts, stats: as merge_splits reads
    them. If there is only one split, out [T, H, D] is written in their place.
    """
    seq, split = first_seq + tl.program_id(0), tl.program_id(2)
    kv_head, tile = tl.program_id(1) // num_tiles, tl.program_id(1) % num_tiles
    begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - begin
    context_len = tl.load(context_lens + seq)
    num_rows, first_row, first_key = q_len * group, tile * BLOCK_M, split * SPLIT
    first_position = context_len - q_len + first_row // group
    if (q_len > max_short) | (first_row >= num_rows):
        return
    if (first_key >= context_len) | (first_key + SPLIT <= first_seen_key(first_position, window, is_chunked)):
        return
    acc, m, total, tokens, heads, is_row = attend_rows(
        q, cache, scales, key_ends, block_tables + seq.to(tl.int64) * table_stride, first_row, num_rows, begin,
        first_key, first_key + SPLIT, q_len, context_len, kv_head, num_kv_heads, group, q_stride, block_stride,
        scale_stride, block_shift, window, is_chunked, scale, cap, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STORED_AS,
        HAS_CAP, DOT, VALUE_DOT,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    is_stored = is_row[:, None] & (d < HEAD_DIM)[None, :]
    num_heads = num_kv_heads * group
    if num_splits == 1:
        sink = tl.load(sinks + heads, mask=is_row & (heads < num_sinks), other=float("-inf")) * 1.4426950408889634
        address = ((begin + tokens).to(tl.int64) * num_heads + heads) * HEAD_DIM
        mean = with_sink(acc, m, total, sink)
        tl.store(out + address[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=is_stored)
    else:
        row = row_of(begin, tokens, seq - first_seq, row_unit).to(tl.int64)
        row = (row * num_heads + heads) * num_splits + split
        tl.store(parts + row[:, None] * HEAD_DIM + d[None, :], acc, mask=is_stored)
        tl.store(stats + 2 * row, m, mask=is_row)
        tl.store(stats + 2 * row + 1, total, mask=is_row)


@triton.jit(do_not_specialize=_NUMBERS)
def attend_long(
    q, cache, scales, key_ends, block_tables, context_lens, cu_seqlens_q, sinks, out,
    num_seqs, num_kv_heads, group, q_stride, table_stride, block_stride, scale_stride, block_shift, window, is_chunked,
    num_sinks, max_short, scale, cap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STORED_AS: tl.constexpr, HAS_CAP: tl.constexpr, DOT: tl.constexpr, VALUE_DOT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a long sequence to all keys that it sees. One program for each tile and KV head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = find_sequence(cu_seqlens_q, tile, num_seqs, group, BLOCK_M)
    begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - begin
    context_len = tl.load(context_lens + seq)
    num_rows = q_len * group
    first_row = (tile - (begin * group // BLOCK_M + seq)) * BLOCK_M
    if (q_len <= max_short) | (first_row >= num_rows):
        return
    acc, m, total, tokens, heads, is_row = attend_rows(
        q, cache, scales, key_ends, block_tables + seq.to(tl.int64) * table_stride, first_row, num_rows, begin, 0,
        context_len, q_len, context_len, kv_head, num_kv_heads, group, q_stride, block_stride, scale_stride,
        block_shift, window, is_chunked, scale, cap, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STORED_AS, HAS_CAP, DOT,
        VALUE_DOT,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    sink = tl.load(sinks + heads, mask=is_row & (heads < num_sinks), other=float("-inf")) * 1.4426950408889634
    address = ((begin + tokens).to(tl.int64) * (num_kv_heads * group) + heads) * HEAD_DIM
    mean = with_sink(acc, m, total, sink)
    mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out + address[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=mask)
