"""Parts that all attention kernels share: softmax tile by tile, merging of splits, and numbers of 8 bits.

The softmax of a row is computed over tiles of keys with a running maximum m and a running sum l (Milakov and Gimelshein
2018, arXiv:1805.02867), and the values are summed along with it, as in FlashAttention (Dao et al. 2022,
arXiv:2205.14135). Everything is in float32 and in base 2: a score s counts exp2(factor * s - m), factor being the scale
times log2(e). Splits of the keys are merged as in Flash-Decoding (Dao et al. 2023).

Bits: all boundaries of tiles and splits are multiples of constants, counted from the first token of the sequence; a
tile that a row does not see changes nothing; and kernels are compiled without fusing multiplications and additions
except where they say fma. So a row's result does not depend on the rows, tiles and sequences beside it.
"""

import os

import torch
import triton
import triton.language as tl

from pagewick.kernels.triton.variant import TYPE_NAMES

LOG2_E = 1.4426950408889634
# Splits that are merged at once.
MERGE_TILE = 8

_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The form in which a kernel reads each dtype of the cache. Not every target has instructions for fp8, so kernels read
# its bytes.
STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
STORED_TYPES = {"int8": "*i8", "fp8_e4m3": "*u8", "fp8_e5m2": "*u8", "int4": "*u8"}


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type that products take. The interpreter multiplies only float32 rightly."""
    return tl.float32 if _IS_INTERPRETED else _DOT_TYPES[dtype]


def value_type(dtype: torch.dtype, stored: str) -> tl.dtype:
    """Return the type of the second product: of weights, times the scales of 8-bit values, with these values.

    Scaled weights would be too small for float16 where values are small. bfloat16 holds every number of 8 bits.
    """
    return dot_type(torch.bfloat16 if stored and dtype == torch.float16 else dtype)


def pointer_type(dtype: torch.dtype, stored: str) -> str:
    """Return Triton's type of a pointer to the numbers of a cache, for queries of a dtype."""
    return STORED_TYPES.get(stored, f"*{TYPE_NAMES[dtype]}")


@triton.jit
def decoded(x, STORED_AS: tl.constexpr, DOT: tl.constexpr):
    """Numbers as they lie in the cache -> numbers for products. fp8 becomes float16 by its bits, which is exact."""
    if STORED_AS == "fp8_e4m3":
        bits = x.to(tl.int16)
        # The exponent's bias is 7 instead of 15, hence 2^8. Bits of float16 are those of int16.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = converted(half * 256.0, DOT)
    elif STORED_AS == "fp8_e5m2":
        numbers = converted((x.to(tl.int16) << 8).to(tl.float16, bitcast=True), DOT)
    else:
        numbers = converted(x, DOT)
    return numbers


@triton.jit
def decoded_pairs(x, DOT: tl.constexpr):
    """Bytes [N, D / 2] of two numbers of 4 bits each -> numbers for products [N, D]."""
    both = x.to(tl.int16)
    low, high = ((both & 15) ^ 8) - 8, (both >> 4 ^ 8) - 8
    return converted(tl.reshape(tl.join(low, high), (x.shape[0], 2 * x.shape[1])), DOT)


@triton.jit
def converted(x, DTYPE: tl.constexpr):
    """Convert numbers by way of float32, unless they have the dtype."""
    return x if x.dtype == DTYPE else x.to(tl.float32).to(DTYPE)


@triton.jit
def next_weights(scores, factor, m, total):
    """Add scores [M, N], -inf where hidden, to the softmax: (weights [M, N], correction, m and sum of weights [M])."""
    new_m = tl.maximum(m, tl.max(scores, 1) * factor)
    # No key seen yet: any number but -inf.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    correction = tl.exp2(m - base)
    return weights, correction, new_m, total * correction + tl.sum(weights, 1)


@triton.jit
def with_sink(acc, m, total, sink):
    """Add a logit without a value, in base 2 [M], to the sums; -inf: there is none. Returns the weighted mean."""
    new_m = tl.maximum(m, sink)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    correction = tl.exp2(m - base)
    whole = total * correction + tl.exp2(sink - base)
    # Rows that see nothing at all are never stored.
    whole = tl.where(whole == 0.0, 1.0, whole)
    return acc * correction[:, None] / whole[:, None]


@triton.jit
def first_seen_key(position, window, is_chunked):
    """Return the first key that queries at these positions see: options.ScoreOptions.first_key."""
    return tl.where(is_chunked != 0, position - position % window, tl.maximum(position - window + 1, 0))


@triton.jit
def row_of(begin, token, place, row_unit):
    """Return the row of a token's results in `parts`: the token's index in the batch if row_unit is 0.

    Otherwise each sequence has row_unit rows, and `place` is the sequence's.
    """
    return tl.where(row_unit == 0, begin, place * row_unit) + token


# Numbers that vary.
_NUMBERS = ["max_short", "num_heads", "window", "is_chunked", "num_sinks", "first_seq", "row_unit", "num_splits"]


@triton.jit(do_not_specialize=_NUMBERS)
def merge_splits(
    parts, stats, key_ends, context_lens, cu_seqlens_q, sinks, out,
    max_short, num_heads, window, is_chunked, num_sinks, first_seq, row_unit, num_splits,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of short sequences, in their order. One program for each sequence from first_seq on, and head.

    parts: [rows, H, num_splits, WIDTH] float32; stats: [rows, H, num_splits, 2] float32, m and l. row_unit: see
    row_of. key_ends: as in AttentionMetadata, or None.
    """
    seq, head = first_seq + tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - begin
    if q_len > max_short:
        return
    context_len = tl.load(context_lens + seq)
    d = tl.arange(0, BLOCK_D)
    sink = tl.load(sinks + head, mask=head < num_sinks, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    for token in range(0, q_len):
        position = context_len - q_len + token
        first_split = first_seen_key(position, window, is_chunked) // SPLIT
        last_key = position if key_ends is None else tl.load(key_ends + begin + token) - 1
        end_split = last_key // SPLIT + 1
        row = (row_of(begin, token, seq - first_seq, row_unit).to(tl.int64) * num_heads + head) * num_splits
        m = tl.full((1,), float("-inf"), tl.float32)
        for start in range(first_split // TILE * TILE, end_split, TILE):
            split = start + tl.arange(0, TILE)
            seen = (split >= first_split) & (split < end_split)
            m = tl.maximum(m, tl.max(tl.load(stats + 2 * (row + split), mask=seen, other=float("-inf")), 0))
        base = tl.where(m == float("-inf"), 0.0, m)
        total = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, BLOCK_D), tl.float32)
        for start in range(first_split // TILE * TILE, end_split, TILE):
            split = start + tl.arange(0, TILE)
            seen = (split >= first_split) & (split < end_split)
            weight = tl.exp2(tl.load(stats + 2 * (row + split), mask=seen, other=float("-inf")) - base)
            total += tl.sum(weight * tl.load(stats + 2 * (row + split) + 1, mask=seen, other=0.0), 0)
            part = tl.load(
                parts + (row + split)[:, None] * WIDTH + d[None, :],
                mask=seen[:, None] & (d < WIDTH)[None, :],
                other=0.0,
            )
            acc += tl.sum(weight[:, None] * part, 0)[None, :]
        mean = with_sink(acc, m, total, sink + tl.zeros_like(m))
        target = out + ((begin + token).to(tl.int64) * num_heads + head) * WIDTH
        tl.store(target + d[None, :], mean.to(out.dtype.element_ty), mask=(d < WIDTH)[None, :])
