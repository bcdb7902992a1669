"""The kernels of attention to a window and to entries; window_attention.py says how they divide the work."""

import triton
import triton.language as tl

from pagewick.kernels.triton.compress import sequence_of
from pagewick.kernels.triton.online_softmax import converted, next_weights, row_of, with_sink


@triton.jit
def seen_entries(counts, token, position, ratio, KIND: tl.constexpr):
    """Return how many entries a token of the batch sees. counts: [T], of those selected."""
    if KIND == "none":
        number = 0
    elif KIND == "all":
        number = (position + 1) // ratio
    else:
        number = tl.load(counts + token)
    return number


@triton.jit
def add_keys(acc, m, total, queries, address, exists, factor, DOT: tl.constexpr):
    """Attend with queries [M, D] to keys at addresses [N, D], of which some exist [N]; returns acc, m and total."""
    keys = converted(tl.load(address, mask=exists[:, None], other=0), DOT)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = tl.where(exists[None, :], scores, float("-inf"))
    weights, correction, m, total = next_weights(scores, factor, m, total)
    acc = tl.dot(weights.to(DOT), keys, acc * correction[:, None], input_precision="ieee")
    return acc, m, total


@triton.jit
def attend_token(
    q, cache, block_tables, entries, entry_tables, slots, seq, token, first_head, position, sees_window, first_entry,
    end_entry, num_heads, window, table_stride, block_stride, block_size, entry_table_stride, entry_stride,
    of_block, slot_stride, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend with heads first_head .. of a token to its window, if it is seen, and to entries first_entry .. end_entry.

    of_block: entries of a block. Returns (acc [M, D], m [M], l [M], row of q and out [M], is_row [M]).
    """
    heads, d = first_head + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    is_row = heads < num_heads
    rows = token.to(tl.int64) * num_heads + tl.where(is_row, heads, 0)
    queries = converted(tl.load(q + rows[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0), DOT)
    factor = scale * 1.4426950408889634
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    # The blocks of earlier keys may belong to another sequence by now.
    first_key = tl.where(sees_window, tl.maximum(position + 1 - window, 0), position + 1)
    for start in range(first_key, position + 1, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n <= position
        block_ids = tl.load(table + n // block_size, mask=exists, other=0).to(tl.int64)
        address = (cache + block_ids * block_stride + n % block_size * DIM)[:, None] + d[None, :]
        acc, m, total = add_keys(acc, m, total, queries, address, exists, factor, DOT)
    if KIND != "none":
        for start in range(first_entry, end_entry, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            exists = n < end_entry
            if KIND == "selected":
                slot = tl.load(slots + token.to(tl.int64) * slot_stride + n, mask=exists, other=0)
                block_ids, place = slot // of_block, slot % of_block
            else:
                entry_table = entry_tables + seq.to(tl.int64) * entry_table_stride
                block_ids, place = tl.load(entry_table + n // of_block, mask=exists, other=0), n % of_block
            address = (entries + block_ids.to(tl.int64) * entry_stride + place * DIM)[:, None] + d[None, :]
            acc, m, total = add_keys(acc, m, total, queries, address, exists, factor, DOT)
    return acc, m, total, rows, is_row


# Numbers that vary; those that do not are multiples of 16.
_NUMBERS = [
    "num_seqs", "num_heads", "window", "table_stride", "block_size", "entry_table_stride", "of_block", "slot_stride",
    "ratio", "max_short", "num_tiles", "first_seq", "row_unit", "num_splits",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def attend_short_window(
    q, cache, block_tables, context_lens, cu_seqlens_q, sinks, entries, entry_tables, slots, counts, out, parts, stats,
    num_heads, window, table_stride, block_stride, block_size, entry_table_stride, entry_stride, of_block, slot_stride,
    ratio, max_short, num_tiles, first_seq, row_unit, num_splits, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of heads of a token of a short sequence to the window, or to a split of the entries.

    One program for each sequence from first_seq on, token and tile, and split, of which the first one is the window.
    parts, stats: as merge_entries reads them. If there is only one split, out [T, H, D] is written in their place.
    """
    seq, split = first_seq + tl.program_id(0), tl.program_id(2)
    number, tile = tl.program_id(1) // num_tiles, tl.program_id(1) % num_tiles
    begin, end = tl.load(cu_seqlens_q + seq), tl.load(cu_seqlens_q + seq + 1)
    if (end - begin > max_short) | (number >= end - begin):
        return
    token = begin + number
    position = tl.load(context_lens + seq) - end + token
    num_entries = seen_entries(counts, token, position, ratio, KIND)
    first_entry = (split - 1) * SPLIT
    if first_entry >= num_entries:
        return
    acc, m, total, rows, is_row = attend_token(
        q, cache, block_tables, entries, entry_tables, slots, seq, token, tile * BLOCK_M, position, split == 0,
        tl.maximum(first_entry, 0), tl.minimum(first_entry + SPLIT, num_entries), num_heads, window, table_stride,
        block_stride, block_size, entry_table_stride, entry_stride, of_block, slot_stride, scale, DIM, BLOCK_M,
        BLOCK_N, KIND, DOT,
    )  # fmt: skip
    d = tl.arange(0, DIM)
    heads = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if num_splits == 1:
        mean = with_sink(acc, m, total, tl.load(sinks + heads, mask=is_row, other=float("-inf")) * 1.4426950408889634)
        tl.store(out + rows[:, None] * DIM + d[None, :], mean.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        row = row_of(begin, number, seq - first_seq, row_unit).to(tl.int64) * num_heads + heads
        row = row * num_splits + split
        tl.store(parts + row[:, None] * DIM + d[None, :], acc, mask=is_row[:, None])
        tl.store(stats + 2 * row, m, mask=is_row)
        tl.store(stats + 2 * row + 1, total, mask=is_row)


@triton.jit(do_not_specialize=_NUMBERS)
def merge_entries(
    parts, stats, context_lens, cu_seqlens_q, sinks, counts, out,
    num_heads, ratio, max_short, first_seq, row_unit, num_splits,
    DIM: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token and head, in their order: one program for each sequence, token and head.

    parts: [rows, H, num_splits, D] float32; stats: [rows, H, num_splits, 2] float32, m and l. row_unit: see row_of.
    """
    seq, number, head = first_seq + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_seqlens_q + seq), tl.load(cu_seqlens_q + seq + 1)
    if (end - begin > max_short) | (number >= end - begin):
        return
    token, d = begin + number, tl.arange(0, DIM)
    num_entries = seen_entries(counts, token, tl.load(context_lens + seq) - end + token, ratio, KIND)
    num_own = 1 + (num_entries + SPLIT - 1) // SPLIT
    row = (row_of(begin, number, seq - first_seq, row_unit).to(tl.int64) * num_heads + head) * num_splits
    m = tl.full((1,), float("-inf"), tl.float32)
    for start in range(0, num_own, TILE):
        split = start + tl.arange(0, TILE)
        m = tl.maximum(m, tl.max(tl.load(stats + 2 * (row + split), mask=split < num_own, other=float("-inf")), 0))
    base = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DIM), tl.float32)
    for start in range(0, num_own, TILE):
        split = start + tl.arange(0, TILE)
        seen = split < num_own
        weight = tl.exp2(tl.load(stats + 2 * (row + split), mask=seen, other=float("-inf")) - base)
        total += tl.sum(weight * tl.load(stats + 2 * (row + split) + 1, mask=seen, other=0.0), 0)
        part = tl.load(parts + (row + split)[:, None] * DIM + d[None, :], mask=seen[:, None], other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)[None, :]
    mean = with_sink(acc, m, total, tl.load(sinks + head) * 1.4426950408889634 + tl.zeros_like(m))
    tl.store(out + (token.to(tl.int64) * num_heads + head) * DIM + d[None, :], mean.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=_NUMBERS)
def attend_long_window(
    q, cache, block_tables, context_lens, cu_seqlens_q, sinks, entries, entry_tables, slots, counts, out,
    num_seqs, num_heads, window, table_stride, block_stride, block_size, entry_table_stride, entry_stride, of_block,
    slot_stride, ratio, max_short, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of heads of a token of a long sequence to all that it sees. One program for each."""
    token, tile = tl.program_id(0), tl.program_id(1)
    seq = sequence_of(cu_seqlens_q, token, num_seqs)
    begin, end = tl.load(cu_seqlens_q + seq), tl.load(cu_seqlens_q + seq + 1)
    if end - begin <= max_short:
        return
    position = tl.load(context_lens + seq) - end + token
    acc, m, total, rows, is_row = attend_token(
        q, cache, block_tables, entries, entry_tables, slots, seq, token, tile * BLOCK_M, position, True, 0,
        seen_entries(counts, token, position, ratio, KIND), num_heads, window, table_stride, block_stride, block_size,
        entry_table_stride, entry_stride, of_block, slot_stride, scale, DIM, BLOCK_M, BLOCK_N, KIND, DOT,
    )  # fmt: skip
    d = tl.arange(0, DIM)
    heads = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mean = with_sink(acc, m, total, tl.load(sinks + heads, mask=is_row, other=float("-inf")) * 1.4426950408889634)
    tl.store(out + rows[:, None] * DIM + d[None, :], mean.to(out.dtype.element_ty), mask=is_row[:, None])
