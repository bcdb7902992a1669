"""Exact choice of the best scores of each token, without sorting or waiting for the host: radix selection.

A part of index.select_keys. A row of scores is divided into parts of PART, one program each. A score becomes a key of
32 bits, of which every launch of count_digits looks at 8, the highest first: each program counts the scores of its part
by their next 8 bits, among those that have the bits of the threshold so far, and the next launch finds by the sums of
all parts which 8 bits the threshold has. The threshold is the key of the last score that is chosen. collect_slots
writes the places of all better scores, and of the first of those that are equal to it, in their order. Counts are whole
numbers, so that a row's result depends on that row alone.

Dimensions: T tokens, B sequences, N rows (tokens whose scores are there at once), P parts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata, SelectedKeys
from pagewick.kernels.triton.variant import Variant

PART = 4096
# Values of 8 bits, and launches until all 32 bits of the threshold are known.
NUM_DIGITS = 256
NUM_LEVELS = 4
_TOKENS = 128
# Parts whose counts a program loads at once.
_PARTS_AT_ONCE = 8


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_steps", "top_k", "ratio"])
def number_tokens(
    context_lens, cu_seqlens_q, seqs, visible, counts, starts, num_tokens, num_seqs, num_steps, top_k, ratio,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write for each token its sequence, how many keys it sees, and how many of them are chosen: [T] int32 each.

    starts: [T + 1] int32, 0, 1, 2, ... T. num_steps: of a search among num_seqs sequences. ratio: tokens of a key.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq, behind = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32) + num_seqs
    for _ in range(num_steps):
        middle = (seq + behind) // 2
        is_before = tl.load(cu_seqlens_q + middle) <= tokens
        seq, behind = tl.where(is_before, middle, seq), tl.where(is_before, behind, middle)
    num_later = tl.load(cu_seqlens_q + seq + 1) - tokens - 1
    num_visible = (tl.load(context_lens + seq) - num_later) // ratio
    tl.store(seqs + tokens, seq, mask=tokens < num_tokens)
    tl.store(visible + tokens, num_visible, mask=tokens < num_tokens)
    tl.store(counts + tokens, tl.minimum(num_visible, top_k), mask=tokens < num_tokens)
    tl.store(starts + tokens, tokens, mask=tokens <= num_tokens)


@triton.jit
def keys_of(scores):
    """Return int32 whose bits, as unsigned numbers, rise with scores (float32). Both zeros are equal; NaN is 0."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, 0, rising ^ -0x80000000)


@triton.jit
def next_digit(
    counts, thresholds, row, num_rows, num_parts, first_parts, top_k, LEVEL: tl.constexpr, NUM_DIGITS: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return the threshold with the bits that the launch of LEVEL has counted, and how many scores are wanted with it.

    counts: those of a row, [P, NUM_DIGITS]. The third result: how many scores with greater bits are in the first
    first_parts parts. The fourth: how many with the same. The fifth: the bits.
    """
    threshold, wanted = 0, top_k
    if LEVEL > 0:
        state = thresholds + ((LEVEL % 2) * num_rows + row) * 2
        threshold, wanted = tl.load(state), tl.load(state + 1)
    digits = tl.arange(0, NUM_DIGITS)
    totals, earlier = tl.zeros((NUM_DIGITS,), tl.int32), tl.zeros((NUM_DIGITS,), tl.int32)
    for first in range(0, num_parts, PARTS_AT_ONCE):
        parts = first + tl.arange(0, PARTS_AT_ONCE)
        places = parts[:, None] * NUM_DIGITS + digits[None, :]
        found = tl.load(counts + places, mask=(parts < num_parts)[:, None], other=0)
        totals += tl.sum(found, 0)
        earlier += tl.sum(tl.where((parts < first_parts)[:, None], found, 0), 0)
    # How many have these bits or greater ones.
    at_least = tl.sum(totals, 0) - tl.cumsum(totals, 0) + totals
    digit = tl.max(tl.where(at_least >= wanted, digits, 0), 0)
    wanted -= tl.sum(tl.where(digits > digit, totals, 0), 0)
    num_greater = tl.sum(tl.where(digits > digit, earlier, 0), 0)
    num_equal = tl.sum(tl.where(digits == digit, earlier, 0), 0)
    return threshold | (digit << (24 - 8 * LEVEL)), wanted, num_greater, num_equal, digit


# Numbers that vary.
_NUMBERS = ["first_token", "score_stride", "num_rows", "max_parts", "top_k"]


@triton.jit(do_not_specialize=_NUMBERS)
def count_digits(
    scores, visible, counts, greater, thresholds, first_token, score_stride, num_rows, max_parts, top_k,
    LEVEL: tl.constexpr, PART: tl.constexpr, NUM_DIGITS: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Count the scores of part program_id(1) of row program_id(0) that may be the threshold, by 8 of their bits.

    scores: [N, score_stride]. counts: [2, N, P, 256] int32, written by one launch in one half, read by the next.
    greater: [3, N, P] int32, the scores of a part that are above the threshold by the bits of each level but the last.
    thresholds: [2, N, 2] int32, the bits that are known, and how many scores with these bits are wanted.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_keys = tl.load(visible + first_token + row)
    if (num_keys <= top_k) | (part * PART >= num_keys):
        return
    n = part * PART + tl.arange(0, PART)
    row_scores = tl.multiple_of(scores + row * score_stride, 16)
    keys = keys_of(tl.load(row_scores + n, mask=n < num_keys, other=0.0))
    is_counted = n < num_keys
    own = row * max_parts + part
    digits = tl.arange(0, NUM_DIGITS)
    if LEVEL > 0:
        half = counts + ((LEVEL - 1) % 2) * num_rows.to(tl.int64) * max_parts * NUM_DIGITS
        threshold, wanted, _, _, digit = next_digit(
            half + row * max_parts * NUM_DIGITS, thresholds, row, num_rows, tl.cdiv(num_keys, PART), 0, top_k,
            LEVEL - 1, NUM_DIGITS, PARTS_AT_ONCE,
        )  # fmt: skip
        num_greater = tl.sum(tl.where(digits > digit, tl.load(half + own * NUM_DIGITS + digits), 0), 0)
        tl.store(greater + (LEVEL - 1) * num_rows.to(tl.int64) * max_parts + own, num_greater)
        if part == 0:
            state = thresholds + ((LEVEL % 2) * num_rows + row) * 2
            tl.store(state, threshold)
            tl.store(state + 1, wanted)
        is_counted &= ((keys ^ threshold) >> (32 - 8 * LEVEL)) == 0
    found = tl.histogram((keys >> (24 - 8 * LEVEL)) & (NUM_DIGITS - 1), NUM_DIGITS, mask=is_counted)
    half = counts + (LEVEL % 2) * num_rows.to(tl.int64) * max_parts * NUM_DIGITS
    tl.store(half + own * NUM_DIGITS + digits, found)


@triton.jit(do_not_specialize=[*_NUMBERS, "table_stride", "block_shift"])
def collect_slots(
    scores, visible, seqs, counts, greater, thresholds, tables, slots, first_token, score_stride, num_rows, max_parts,
    table_stride, block_shift, top_k,
    LEVEL: tl.constexpr, PART: tl.constexpr, NUM_DIGITS: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the slots of the scores that are chosen of part program_id(1) of row program_id(0) to slots [T, top_k].

    If there are no tables, the slots are numbers of keys.
    LEVEL: that of the last count_digits. Rows with no more than top_k scores are chosen as a whole; these are not read.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first_token + row
    num_keys = tl.load(visible + token)
    first = part * PART
    if first >= num_keys:
        return
    n = first + tl.arange(0, PART)
    is_chosen = n < num_keys
    if num_keys > top_k:
        row_scores = tl.multiple_of(scores + row * score_stride, 16)
        keys = keys_of(tl.load(row_scores + n, mask=is_chosen, other=0.0))
        half = counts + (LEVEL % 2) * num_rows.to(tl.int64) * max_parts * NUM_DIGITS
        threshold, wanted, num_greater, num_equal, _ = next_digit(
            half + row * max_parts * NUM_DIGITS, thresholds, row, num_rows, tl.cdiv(num_keys, PART), part, top_k,
            LEVEL, NUM_DIGITS, PARTS_AT_ONCE,
        )  # fmt: skip
        for before in range(0, part, NUM_DIGITS):
            parts = before + tl.arange(0, NUM_DIGITS)
            for level in tl.static_range(LEVEL):
                places = (level * num_rows + row) * max_parts + parts
                num_greater += tl.sum(tl.load(greater + places, mask=parts < part, other=0), 0)
        is_equal = is_chosen & (keys == threshold)
        rank = num_equal + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        is_greater = (keys ^ -0x80000000) > (threshold ^ -0x80000000)
        is_chosen = (is_chosen & is_greater) | (is_equal & (rank < wanted))
        first = num_greater + tl.minimum(num_equal, wanted)
    places = first + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    found = n
    if tables is not None:
        table = tables + tl.load(seqs + token).to(tl.int64) * table_stride
        block_ids = tl.load(table + (n >> block_shift), mask=is_chosen, other=0)
        found = (block_ids << block_shift) + (n & ((1 << block_shift) - 1))
    tl.store(slots + token * top_k + places, found, mask=is_chosen)


_SIZES = {"PART": PART, "NUM_DIGITS": NUM_DIGITS, "PARTS_AT_ONCE": _PARTS_AT_ONCE}
_ROWS = {
    "scores": "*fp32", "visible": "*i32", "counts": "*i32", "greater": "*i32", "thresholds": "*i32",
    **dict.fromkeys(_NUMBERS, "i32"),
}  # fmt: skip
_NUMBER = Variant(
    "number_tokens", number_tokens,
    {"context_lens": "*i32", "cu_seqlens_q": "*i32", "seqs": "*i32", "visible": "*i32", "counts": "*i32",
     "starts": "*i32", "num_tokens": "i32", "num_seqs": "i32", "num_steps": "i32", "top_k": "i32", "ratio": "i32"},
    {"BLOCK": _TOKENS},
)  # fmt: skip
_COUNT = tuple(
    Variant(f"count_digits {level}", count_digits, _ROWS, {"LEVEL": level, **_SIZES}, num_warps=8, in_sample=level == 3)
    for level in range(NUM_LEVELS)
)
_COLLECT = {
    has_tables: Variant(
        f"collect_slots{'' if has_tables else ' numbers'}", collect_slots,
        {**_ROWS, "seqs": "*i32", **({"tables": "*i32"} if has_tables else {}), "slots": "*i32", "table_stride": "i32",
         "block_shift": "i32"},
        {"LEVEL": NUM_LEVELS - 1, **_SIZES, **({} if has_tables else {"tables": None})},
        num_warps=8, in_sample=has_tables,
    )
    for has_tables in (True, False)
}  # fmt: skip
VARIANTS = (_NUMBER, *_COUNT, *_COLLECT.values())


class NumberedTokens(NamedTuple):
    """The tokens of a batch. seqs, visible: [T] int32, the sequence of each, and how many keys it sees.

    selected: its counts and starts; Choice.run writes the slots.
    """

    seqs: Tensor
    visible: Tensor
    selected: SelectedKeys


def numbered(metadata: AttentionMetadata, num_tokens: int, top_k: int, ratio: int = 1) -> NumberedTokens:
    """Number the tokens of a batch. All sequences together have num_tokens new tokens. ratio: tokens of a key."""
    context_lens, num_seqs = metadata.context_lens, len(metadata.context_lens)
    seqs, visible, counts = (context_lens.new_empty(num_tokens) for _ in range(3))
    slots, starts = context_lens.new_empty(num_tokens, top_k), context_lens.new_empty(num_tokens + 1)
    _NUMBER.launch(
        (num_tokens // _TOKENS + 1,), context_lens=context_lens, cu_seqlens_q=metadata.cu_seqlens_q, seqs=seqs,
        visible=visible, counts=counts, starts=starts, num_tokens=num_tokens, num_seqs=num_seqs,
        num_steps=num_seqs.bit_length(), top_k=top_k, ratio=ratio,
    )  # fmt: skip
    return NumberedTokens(seqs, visible, SelectedKeys(slots, counts, starts))


def row_bytes(num_keys: int) -> int:
    """Return the bytes that a row of num_keys scores takes, with its counts."""
    return 4 * (num_keys + num_parts(num_keys) * (2 * NUM_DIGITS + NUM_LEVELS - 1) + 4)


def num_parts(num_keys: int) -> int:
    """Return into how many parts a row is divided."""
    return -(-num_keys // PART)


class Choice:
    """Memory to choose among the scores of up to num_rows tokens at once, for rows of score_stride numbers."""

    def __init__(self, num_rows: int, score_stride: int, device: torch.device) -> None:
        shape = num_rows, num_parts(score_stride)
        self.scores = torch.empty(num_rows, score_stride, device=device)
        self._counts = torch.empty(2, *shape, NUM_DIGITS, dtype=torch.int32, device=device)
        self._greater = torch.empty(NUM_LEVELS - 1, *shape, dtype=torch.int32, device=device)
        self._thresholds = torch.empty(2, num_rows, 2, dtype=torch.int32, device=device)

    def run(
        self, tokens: NumberedTokens, first_token: int, num_rows: int, tables: Tensor | None, block_size: int
    ) -> None:
        """Write the slots of the best of scores for num_rows tokens from first_token on.

        tables: [B, blocks] int32, those in which the chosen keys are to be found; None: slots are their numbers. A
        token's scores count up to the number of keys that it sees; if that is not above top_k, all of them are chosen
        and its scores are not read. NaN is
        worse than any number; among equal scores, the earlier one is better.
        """
        top_k = tokens.selected.slots.shape[1]
        rows = {
            "scores": self.scores, "visible": tokens.visible, "counts": self._counts, "greater": self._greater,
            "thresholds": self._thresholds, "first_token": first_token, "score_stride": self.scores.stride(0),
            "num_rows": len(self.scores), "max_parts": self._greater.shape[2], "top_k": top_k,
        }  # fmt: skip
        grid = num_rows, self._greater.shape[2]
        if self.scores.shape[1] > top_k:
            for count in _COUNT:
                count.launch(grid, **rows)
        found = {} if tables is None else {"tables": tables}
        _COLLECT[tables is not None].launch(
            grid, seqs=tokens.seqs, slots=tokens.selected.slots, table_stride=0 if tables is None else tables.stride(0),
            block_shift=block_size.bit_length() - 1, **rows, **found,
        )  # fmt: skip
