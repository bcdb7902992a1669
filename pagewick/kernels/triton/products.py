"""Kernels for products with weights that are decoded in registers. T: rows of x; N: outputs; K: inputs; E: experts.

Both kernels serve quantized weights in all formats of layouts.py, and plain ones of experts, which have x's dtype. A
row of x is one of a batch, or a choice: one of a token's experts (reference_moe.py). Activations are not quantized.

- `rows_kernel`: one row of x in a program. It sums levels times activations in float32 for each group of columns, then
  scales the sum; nothing is rounded in between. Bits of a row depend on nothing but the row.
- `tiles_kernel`: tiles of rows. Decoded weights are rounded to x's dtype and multiplied on tensor cores, sums are
  float32. Bits of a row depend on the tile's size alone, so on the number of rows where the size is chosen by it.

Both add columns in a fixed order. The method is that of https://arxiv.org/abs/2408.11743 (Marlin): weights stay in
their format until they are in registers; sorting choices into tiles of one expert is that of
https://arxiv.org/abs/2211.15841 (MegaBlocks), without copying x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagewick.kernels.triton import layouts

_PLAIN = tl.constexpr(layouts.PLAIN)
_E4M3 = tl.constexpr(layouts.E4M3)
_E2M1 = tl.constexpr(layouts.E2M1)
_CODES = tl.constexpr(layouts.CODES)
_BYTES = tl.constexpr(layouts.BYTES)
_SIGNED_BYTES = tl.constexpr(layouts.SIGNED_BYTES)
_NIBBLES = tl.constexpr(layouts.NIBBLES)
_POWERS = tl.constexpr(layouts.POWERS)
_NO_MINIMA = tl.constexpr(layouts.NO_MINIMA)
_OF_BLOCKS = tl.constexpr(layouts.OF_BLOCKS)
_OF_GROUPS = tl.constexpr(layouts.OF_GROUPS)
_ZERO_POINTS = tl.constexpr(layouts.ZERO_POINTS)


@triton.jit
def _spread(words, BITS: tl.constexpr):
    """Return the numbers of BITS bits [n, w * 32 / BITS] of words [n, w] int32, from the lowest bits on."""
    if BITS <= 16:
        words = tl.interleave(words & 0xFFFF, (words >> 16) & 0xFFFF)
    if BITS <= 8:
        words = tl.interleave(words & 0xFF, words >> 8)
    if BITS <= 4:
        words = tl.interleave(words & 0xF, words >> 4)
    if BITS <= 2:
        words = tl.interleave(words & 3, words >> 2)
    if BITS <= 1:
        words = tl.interleave(words & 1, words >> 1)
    return words


@triton.jit
def _plane(words, at_rows, is_row, first, num_columns, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return numbers of BITS bits [n, BLOCK_K] from column `first` on; 0 where there are none."""
    at = first // 32 * BITS + tl.arange(0, BLOCK_K * BITS // 32)
    mask = is_row[:, None] & (at < num_columns // 32 * BITS)[None, :]
    return _spread(tl.load(words + at_rows[:, None] + at[None, :], mask=mask, other=0), BITS)


@triton.jit
def _scales_of(
    codes, scales, row, is_row, first, num_columns, row_words, group_scales_at, group_minima_at, scales_at, minima_at,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr,
    GROUP_SCALES: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Return the scales and minima (or zero points) of groups, each [n, BLOCK_K / GROUP] float32."""
    group = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
    mask = is_row[:, None] & (group < num_columns // GROUP)[None, :]
    of_groups = codes + row[:, None] * (row_words * 4) + group[None, :]
    block = group // (BLOCK // GROUP)
    blocks = row[:, None] * (row_words * (4 // SCALE_BYTES)) + block[None, :]
    if GROUP_SCALES == _POWERS:
        # A float32's exponent has the same bias; 0 stands for the subnormal 2^-127.
        code = tl.load(of_groups + group_scales_at, mask=mask, other=0).to(tl.int32)
        scale = tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + blocks + scales_at, mask=mask, other=0.0).to(tl.float32)
    minimum = tl.zeros_like(scale)
    if MINIMA == _OF_BLOCKS or MINIMA == _OF_GROUPS:  # noqa: SIM109 (Triton has no tuples of constants)
        minimum = tl.load(scales + blocks + minima_at, mask=mask, other=0.0).to(tl.float32)
    if GROUP_SCALES == _NIBBLES:
        code = tl.load(of_groups + group_scales_at, mask=mask, other=0).to(tl.int32)
        scale *= (code & 15).to(tl.float32)
        minimum *= (code >> 4).to(tl.float32)
    if GROUP_SCALES == _BYTES:
        scale *= tl.load(of_groups + group_scales_at, mask=mask, other=0).to(tl.float32)
        minimum *= tl.load(of_groups + group_minima_at, mask=mask, other=0).to(tl.float32)
    if GROUP_SCALES == _SIGNED_BYTES:
        scale *= tl.load(of_groups + group_scales_at, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    if MINIMA == _ZERO_POINTS:
        zeros = codes + row[:, None] * (row_words * 4) + block[None, :]
        minimum = tl.load(zeros + group_minima_at, mask=mask, other=0).to(tl.float32)
    return scale, minimum


@triton.jit
def decode(
    words, codes, scales, row, is_row, first, num_columns,
    row_words, high_at, group_scales_at, group_minima_at, scales_at, minima_at,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr, CODEBOOK_LOW: tl.constexpr,
    CODEBOOK_HIGH: tl.constexpr, SCALE_BYTES: tl.constexpr, GROUP_SCALES: tl.constexpr, MINIMA: tl.constexpr,
    IS_CENTERED: tl.constexpr,
):  # fmt: skip
    """Return levels [BLOCK_N, G, GROUP], scales and minima [BLOCK_N, G] of a tile of a weight, G groups of columns.

    row: [BLOCK_N] int64, rows of all experts counted; first: the tile's first column. A number is scale * level -
    minimum, all in float32; columns beyond the last are 0. Plain weights have the scale 1.
    IS_CENTERED: offsets and zero points are taken from levels, which makes numbers exact; else they are in the minima,
    which spares an instruction for each number.
    """
    num_groups: tl.constexpr = BLOCK_K // GROUP
    at_rows = row * row_words
    if LEVELS == _PLAIN:
        column = first + tl.arange(0, BLOCK_K)
        mask = is_row[:, None] & (column < num_columns)[None, :]
        plain = tl.load(words + at_rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        levels = tl.reshape(plain, [BLOCK_N, num_groups, GROUP])
        scale = tl.full([BLOCK_N, num_groups], 1.0, tl.float32)
        minimum = tl.zeros_like(scale)
    else:
        # Rows and planes begin at multiples of 16 bytes.
        row_words = tl.multiple_of(row_words, 4)
        at_rows = tl.multiple_of(row * row_words, 4)
        scale, minimum = _scales_of(
            codes, scales, row, is_row, first, num_columns, row_words, group_scales_at, group_minima_at, scales_at,
            minima_at, BLOCK_K, BLOCK, GROUP, SCALE_BYTES, GROUP_SCALES, MINIMA,
        )  # fmt: skip
        bits = _plane(words, at_rows, is_row, first, num_columns, LOW_BITS, BLOCK_K)
        if HIGH_BITS > 0:
            upper = _plane(words + high_at, at_rows, is_row, first, num_columns, HIGH_BITS, BLOCK_K)
            bits = bits | (upper << LOW_BITS)
        bits = tl.reshape(bits, [BLOCK_N, num_groups, GROUP])
        if LEVELS == _E4M3:
            # As bits of a float16, whose exponent's bias is larger by 8, they are 2^-8 of the number, subnormal or not.
            # The scale makes up for it, exactly unless it is above 2^119.
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            levels = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            scale *= 256.0
        elif LEVELS == _E2M1:
            # As bits of a float16, whose exponent's bias is larger by 14, they are 2^-14 of the number, subnormal or
            # not. The scale makes up for it, exactly unless it is above 2^113.
            half = ((bits & 8) << 12) | ((bits & 7) << 9)
            levels = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            scale *= 16384.0
        elif LEVELS == _CODES:
            # The bytes of two words are the levels. Loads from a table would each cost as much as some shifts.
            low = tl.full([1, 1, 1], CODEBOOK_LOW, tl.int64)
            high = tl.full([1, 1, 1], CODEBOOK_HIGH, tl.int64)
            word = tl.where(bits < 8, low, high)
            levels = (word >> ((bits & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)
        else:
            levels = bits.to(tl.float32)
            if MINIMA == _ZERO_POINTS:
                if IS_CENTERED:
                    levels -= minimum[:, :, None]
                    minimum = tl.zeros_like(scale)
                else:
                    minimum *= scale
            if OFFSET > 0:
                if IS_CENTERED:
                    levels -= OFFSET
                else:
                    minimum = scale * OFFSET
    return levels, scale, minimum


@triton.jit
def _sums_of_products(levels, of_x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Return the sum of levels [BLOCK_N, G, GROUP] times of_x [G, GROUP] for each group: [BLOCK_N, G].

    Four products make a chain of multiply-adds before sums go over neighbours; else half of them would be two
    instructions.
    """
    even, odd = tl.split(tl.reshape(levels, [BLOCK_N, BLOCK_K // GROUP, GROUP // 4, 2, 2]))
    even_of_x, odd_of_x = tl.split(tl.reshape(of_x, [BLOCK_K // GROUP, GROUP // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    first_of_x, third_of_x = tl.split(even_of_x)
    second_of_x, fourth_of_x = tl.split(odd_of_x)
    products = first * first_of_x[None, :, :] + second * second_of_x[None, :, :]
    products += third * third_of_x[None, :, :]
    products += fourth * fourth_of_x[None, :, :]
    return tl.sum(products, 2)


@triton.jit
def rows_kernel(
    x, words, codes, scales, bias, out, expert_ids, num_rows, num_columns, num_experts, choices_per_row, num_biases,
    x_stride, out_stride, row_words, high_at, group_scales_at, group_minima_at, scales_at, minima_at,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr, CODEBOOK_LOW: tl.constexpr,
    CODEBOOK_HIGH: tl.constexpr, SCALE_BYTES: tl.constexpr, GROUP_SCALES: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Multiply one row of x [T, K] by BLOCK_N rows of a weight: BLOCK_N numbers of out [T, N].

    Defines reference.quantized_linear, with activations as they are, and reference.grouped_linear. Grid: [choices,
    N / BLOCK_N]. num_experts: 0 for one weight; else expert_ids has the weight of each choice, and a choice with an id
    outside 0 .. E - 1 becomes NaN. choices_per_row: the number of choices that share a row of x. num_biases: N or 0.
    """
    choice = tl.program_id(0)
    expert = tl.load(expert_ids + choice, mask=num_experts > 0, other=0)
    is_expert = (expert >= 0) & (expert < tl.maximum(num_experts, 1))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < tl.where(is_expert, num_rows, 0)
    row = expert.to(tl.int64) * num_rows + n
    x += (choice // choices_per_row).to(tl.int64) * x_stride
    total = tl.zeros([BLOCK_N, BLOCK_K // GROUP], tl.float32)
    for first in range(0, num_columns, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        of_x = tl.load(x + column, mask=column < num_columns, other=0.0).to(tl.float32)
        of_x = tl.reshape(of_x, [BLOCK_K // GROUP, GROUP])
        levels, scale, minimum = decode(
            words, codes, scales, row, is_row, first, num_columns, row_words, high_at, group_scales_at,
            group_minima_at, scales_at, minima_at, BLOCK_N, BLOCK_K, LEVELS, BLOCK, GROUP, LOW_BITS, HIGH_BITS, OFFSET,
            CODEBOOK_LOW, CODEBOOK_HIGH, SCALE_BYTES, GROUP_SCALES, MINIMA, False,
        )  # fmt: skip
        total += _sums_of_products(levels, of_x, BLOCK_N, BLOCK_K, GROUP) * scale
        if MINIMA != _NO_MINIMA or OFFSET > 0:
            total -= tl.sum(of_x, 1)[None, :] * minimum
    result = tl.sum(total, 1)
    result += tl.load(bias + expert.to(tl.int64) * num_biases + n, mask=is_row & (n < num_biases), other=0.0)
    result += tl.where(is_expert, 0.0, float("nan"))
    tl.store(out + choice.to(tl.int64) * out_stride + n, result.to(out.dtype.element_ty), mask=n < num_rows)


@triton.jit
def tile_of_choices(tiles, num_choices, num_experts, BLOCK_M: tl.constexpr):
    """Return the expert of this program's tile, and its first place and the one behind its last."""
    tile, is_grouped = tl.program_id(0), num_experts > 0
    expert = tl.load(tiles + 3 * tile, mask=is_grouped, other=0)
    start = tl.load(tiles + 3 * tile + 1, mask=is_grouped, other=0) + tl.where(is_grouped, 0, tile * BLOCK_M)
    end = tl.load(tiles + 3 * tile + 2, mask=is_grouped, other=0) + tl.where(is_grouped, 0, num_choices)
    return expert, start, end


@triton.jit
def choices_of(order, start, end, num_experts, BLOCK_M: tl.constexpr):
    """Return the choices [BLOCK_M] at the places from start on, and which of them are before end."""
    place, is_grouped = start + tl.arange(0, BLOCK_M), num_experts > 0
    choice = tl.load(order + place, mask=place < tl.where(is_grouped, end, 0), other=0)
    return choice + tl.where(is_grouped, 0, place), place < end


@triton.jit(do_not_specialize=["num_choices"])
def tiles_kernel(
    x, words, codes, scales, bias, out, order, tiles, num_choices, num_rows, num_columns, num_experts, choices_per_row,
    num_biases, x_stride, out_stride, row_words, high_at, group_scales_at, group_minima_at, scales_at, minima_at,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr,
    CODEBOOK_LOW: tl.constexpr, CODEBOOK_HIGH: tl.constexpr, SCALE_BYTES: tl.constexpr, GROUP_SCALES: tl.constexpr,
    MINIMA: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of x by BLOCK_N rows of a weight: a tile of out. Arguments as in rows_kernel.

    Grid: [tiles of rows, N / BLOCK_N]. With experts, order [choices] int32 has the choices sorted by expert, and tiles
    [tiles, 3] int32 each tile's expert and its part of `order`, from one place to before another.
    """
    expert, start, end = tile_of_choices(tiles, num_choices, num_experts, BLOCK_M)
    if start >= end:
        return
    is_expert = expert < tl.maximum(num_experts, 1)
    choice, is_choice = choices_of(order, start, end, num_experts, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < tl.where(is_expert, num_rows, 0)
    row = expert.to(tl.int64) * num_rows + n
    of_x = x + (choice // choices_per_row).to(tl.int64)[:, None] * x_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_columns, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        left = tl.load(of_x + column[None, :], mask=is_choice[:, None] & (column < num_columns)[None, :], other=0.0)
        if LEVELS == _PLAIN:
            is_weight = is_row[:, None] & (column < num_columns)[None, :]
            right = tl.load(words + (row * row_words)[:, None] + column[None, :], mask=is_weight, other=0.0)
        else:
            levels, scale, minimum = decode(
                words, codes, scales, row, is_row, first, num_columns, row_words, high_at, group_scales_at,
                group_minima_at, scales_at, minima_at, BLOCK_N, BLOCK_K, LEVELS, BLOCK, GROUP, LOW_BITS, HIGH_BITS,
                OFFSET, CODEBOOK_LOW, CODEBOOK_HIGH, SCALE_BYTES, GROUP_SCALES, MINIMA, True,
            )  # fmt: skip
            right = levels * scale[:, :, None] - minimum[:, :, None]
            right = tl.reshape(right, [BLOCK_N, BLOCK_K]).to(x.dtype.element_ty)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    total += tl.load(bias + expert.to(tl.int64) * num_biases + n, mask=is_row & (n < num_biases), other=0.0)[None, :]
    total += tl.where(is_expert, 0.0, float("nan"))
    mask = is_choice[:, None] & (n < num_rows)[None, :]
    tl.store(out + choice.to(tl.int64)[:, None] * out_stride + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gather_kernel(
    row_ids, words, codes, scales, out, num_rows, num_columns,
    row_words, high_at, group_scales_at, group_minima_at, scales_at, minima_at,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, OFFSET: tl.constexpr, CODEBOOK_LOW: tl.constexpr,
    CODEBOOK_HIGH: tl.constexpr, SCALE_BYTES: tl.constexpr, GROUP_SCALES: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_K numbers of a row in out [n, K]. BLOCK_N is 1. Grid: [n, K / BLOCK_K].

    Defined by reference.gather_quantized_rows, but a row that does not exist becomes NaN.
    """
    row = tl.load(row_ids + tl.program_id(0) + tl.arange(0, BLOCK_N))
    is_row = (row >= 0) & (row < num_rows)
    first = tl.program_id(1) * BLOCK_K
    levels, scale, minimum = decode(
        words, codes, scales, tl.where(is_row, row, 0), is_row, first, num_columns, row_words, high_at, group_scales_at,
        group_minima_at, scales_at, minima_at, BLOCK_N, BLOCK_K, LEVELS, BLOCK, GROUP, LOW_BITS, HIGH_BITS, OFFSET,
        CODEBOOK_LOW, CODEBOOK_HIGH, SCALE_BYTES, GROUP_SCALES, MINIMA, True,
    )  # fmt: skip
    numbers = tl.reshape(levels * scale[:, :, None] - minimum[:, :, None], [BLOCK_N, BLOCK_K])
    numbers = tl.where(is_row[:, None], numbers, float("nan"))
    column = first + tl.arange(0, BLOCK_K)[None, :]
    place = tl.program_id(0).to(tl.int64) * num_columns + column + tl.zeros([BLOCK_N, 1], tl.int64)
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=column < num_columns)
