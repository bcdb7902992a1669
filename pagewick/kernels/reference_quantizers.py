"""Definition of the quantizers, which turn numbers into rows of blocks.

Dimensions: N rows, K columns, b blocks, n groups, G numbers in a group, P groups in a block.

A group of 16 or 32 columns has a scale, and in some formats a minimum: a number is level * scale + minimum, and a level
is a whole number of a few bits. A block of 32 columns is a group and stores both in float16. A block of 256 columns, in
the K formats, stores the scales and minima of its groups as whole numbers too, multiples of one or two in float16. In
int4 formats, a block is a group with a scale in float32 and a zero point, the level that stands for 0.

Without the search, the largest number of a group gets the outermost level. The search makes a weighted squared error
small: it starts from several scales around that one, rounds to levels, fits the scale (and the minimum) to the levels
by least squares, rounds again, and keeps the best fit. The scales of a block are rounded in the same way, each with the
weights of its group; then minima are fitted to the rounded scales, and rounded. In int4 formats, each start has a
zero point, to which the scale is fitted. llama.cpp searches from more starts and
neither repeats the rounding nor fits minima again (https://github.com/ggml-org/ggml, ggml-quants.c).

A block depends on its own numbers alone. A sum adds float32 numbers one by one in the order of the columns, and no
addition is fused with a multiplication, so that other implementations can have the same bits.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagewick.kernels.reference_packing import HALVES, PACK, Blocks

# A group without a larger number becomes zeros. Float16 cannot store such scales, and float32 can still invert them.
TINY: Final = 2.0**-60
# Larger numbers are refused: no format stores them, and sums of them could overflow.
LARGEST: Final = 2.0**28
# The search starts from these additions to the outermost level, and rounds and fits this often from each start.
OFFSETS: Final = tuple(step * 0.3125 for step in range(-4, 5))
ROUNDS: Final = 4
# The least importance of a column, as a share of the mean of its block.
LEAST_IMPORTANCE: Final = 2.0**-20


class Format(NamedTuple):
    """A block format. num_bytes: of a block of `numbers`; group: G; levels go from low to top.

    scale_low, scale_top: the whole numbers that a block of 256 stores for scales. has_zero: it stores a zero point in
    place of a minimum.
    """

    numbers: int
    num_bytes: int
    group: int
    low: int
    top: int
    has_minimum: bool
    scale_low: int = 0
    scale_top: int = 0
    has_zero: bool = False


FORMATS: Final = {
    "Q4_0": Format(32, 18, 32, -8, 7, False),
    "Q4_1": Format(32, 20, 32, 0, 15, True),
    "Q5_0": Format(32, 22, 32, -16, 15, False),
    "Q5_1": Format(32, 24, 32, 0, 31, True),
    "Q8_0": Format(32, 34, 32, -127, 127, False),
    "Q2_K": Format(256, 84, 16, 0, 3, True, 0, 15),
    "Q3_K": Format(256, 110, 16, -4, 3, False, -32, 31),
    "Q4_K": Format(256, 144, 32, 0, 15, True, 0, 63),
    "Q5_K": Format(256, 176, 32, 0, 31, True, 0, 63),
    "Q6_K": Format(256, 210, 16, -32, 31, False, -128, 127),
    "int4_g32": Format(32, 21, 32, 0, 15, True, has_zero=True),
    "int4_g64": Format(64, 37, 64, 0, 15, True, has_zero=True),
    "int4_g128": Format(128, 69, 128, 0, 15, True, has_zero=True),
}


def quantize_weight(x: Tensor, name: str, importance: Tensor | None = None, search: bool = True) -> Tensor:
    """Return rows x [N, K] as rows of blocks of the format `name`: [N, bytes] uint8.

    importance: [K], how much the error of a column counts; only ratios within a block matter. search: False is faster
    and ignores `importance`. Q8_0 is never searched. Raises ValueError for an unknown format, for a width that does not
    fit its blocks, and for a row with a number that is not finite or too large for a scale in float16.
    """
    kind, importance = check_quantizable(x, name, importance)
    check_numbers(x, name)
    groups, weights = as_groups(x, kind), None
    if search and name != "Q8_0":
        spread = None if importance is None else as_groups(importance.expand(len(x), -1), kind)
        weights = error_weights(groups, kind, spread)
    rows = PACK[name](quantize_groups(groups, weights, kind)).view(len(x), row_bytes(x, kind))
    check_scales(rows, name)
    return rows


def check_quantizable(x: Tensor, name: str, importance: Tensor | None) -> tuple[Format, Tensor | None]:
    """Return the format and the importance [K] float32 with a mean of 1 in each block.

    Raises ValueError as quantize_weight does, but does not look at the numbers in x.
    """
    if name not in FORMATS:
        raise ValueError(f"no quantizer writes {name}; there are quantizers for {', '.join(FORMATS)}")
    kind = FORMATS[name]
    if x.ndim != 2 or x.shape[1] % kind.numbers or not x.shape[1]:
        raise ValueError(f"{name} has blocks of {kind.numbers} columns, which a tensor {list(x.shape)} does not fit")
    if importance is None:
        return kind, None
    if importance.shape != x.shape[1:] or not importance.isfinite().all() or (importance < 0).any():
        raise ValueError(f"importance must be {x.shape[1]} numbers of at least 0, one for each column")
    blocks = importance.double().view(-1, kind.numbers)
    mean = blocks.mean(1, keepdim=True)
    return kind, torch.where(mean > 0, blocks / mean, 1.0).clamp(min=LEAST_IMPORTANCE).float().flatten()


def row_bytes(x: Tensor, kind: Format) -> int:
    """Return the number of bytes of a quantized row of x [N, K]."""
    return x.shape[1] // kind.numbers * kind.num_bytes


def check_numbers(x: Tensor, name: str) -> None:
    """Raise ValueError if x [N, K] has a number that no format stores."""
    _raise_for_row((x.abs() <= LARGEST).all(1), f"a number that is not finite or above 2^28, which {name} cannot store")


def check_scales(rows: Tensor, name: str) -> None:
    """Raise ValueError if a float16 number in rows of blocks [N, bytes] is not finite."""
    blocks = rows.reshape(len(rows), rows.shape[1] // FORMATS[name].num_bytes, FORMATS[name].num_bytes)
    for offset in HALVES.get(name, ()):
        numbers = blocks[..., offset : offset + 2].contiguous().view(torch.float16)
        _raise_for_row(numbers.isfinite().flatten(1).all(1), f"numbers too large for {name}, whose scales are float16")


def _raise_for_row(is_good: Tensor, fault: str) -> None:
    if not is_good.all():
        raise ValueError(f"row {int(is_good.logical_not().nonzero()[0])} has {fault}")


def as_groups(x: Tensor, kind: Format) -> Tensor:
    """Return rows [N, K] as groups [G, n] in float32: a number of every group lies in a row."""
    return x.float().reshape(-1, kind.group).t().contiguous()


def total(x: Tensor) -> Tensor:
    """Return the sums of groups x [G, n], added in the order of their numbers: [n]."""
    return functools.reduce(torch.add, x.unbind(0))


def peak(x: Tensor) -> Tensor:
    """Return the number with the largest magnitude of each group of x [G, n], the first of several: [n]."""
    return functools.reduce(lambda best, row: torch.where(row.abs() > best.abs(), row, best), x.unbind(0))


def divided(x: Tensor, by: float) -> Tensor:
    """Return x / by, rounded once: by a number, PyTorch would multiply with its reciprocal on a GPU."""
    return x / torch.full_like(x, by)


def inverse(x: Tensor, numerator: float = 1.0) -> Tensor:
    """Return numerator / x, and 0 where x is tiny."""
    return torch.where(x.abs() > TINY, torch.full_like(x, numerator) / x, 0.0)


def nearest(x: Tensor, low: int | Tensor, top: int | Tensor) -> Tensor:
    """Return the nearest whole numbers from low to top, the even one of two."""
    return x.clamp(low, top).round()  # type: ignore[arg-type]  # both are numbers, or both are tensors


def error_weights(x: Tensor, kind: Format, importance: Tensor | None) -> Tensor:
    """Return how much the errors of the numbers in groups x [G, n] count: larger numbers count more."""
    if importance is None and kind.group == 16:
        return x.abs()
    squares, per_block = x * x, kind.numbers // kind.group
    mean = total(total(squares).view(-1, per_block).t()) / kind.numbers
    # By way of float64, the root is rounded once; PyTorch's own may be off by a bit.
    weights = (mean.repeat_interleave(per_block) + squares).double().sqrt().float()
    return weights if importance is None else weights * importance


def bounds(x: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Return the least number of groups x [G, n], and how far the largest one is above it: [n] each.

    A minimum of a K format is at most 0. A group with a zero point counts as having a 0.
    """
    # Adding 0 makes 0 of -0.
    low = (x.amin(0).clamp(max=0.0) if kind.scale_top or kind.has_zero else x.amin(0)) + 0.0
    return low, (x.amax(0).clamp(min=0.0) if kind.has_zero else x.amax(0)) - low


def quantize_groups(x: Tensor, weights: Tensor | None, kind: Format) -> Blocks:
    """Quantize groups x [G, n]; weights [G, n]: how much their errors count, or None for no search."""
    minimum = None
    if kind.has_zero:
        return quantize_around_zeros(x, weights, kind)
    if kind.has_minimum:
        scale, scale_weight, minimum = fit_scale_and_minimum(x, weights, kind)
    else:
        scale, scale_weight = fit_scale(x, weights, kind.low, kind.top)
    if not kind.scale_top:
        d, dmin = scale.half(), None if minimum is None else minimum.half()
        if weights is not None:
            scale, minimum = d.float(), None if dmin is None else dmin.float()
        return Blocks(nearest_levels(x, scale, minimum, kind), d, dmin)
    scales, d, scale = round_scales(scale, scale_weight, kind.scale_low, kind)
    if minimum is None:
        return Blocks(nearest_levels(x, scale, None, kind), d, None, scales)
    sums = None if weights is None else total(weights)
    if weights is not None and sums is not None:
        # The minima that fit the rounded scales best.
        levels = nearest((x - minimum) * inverse(scale), 0, kind.top)
        minimum = ((total(weights * x) - scale * total(weights * levels)) * inverse(sums)).clamp(max=0.0)
    minima, dmin, negated = round_scales(-minimum, sums, 0, kind)
    return Blocks(nearest_levels(x, scale, -negated, kind), d, dmin, scales, minima)


def quantize_around_zeros(x: Tensor, weights: Tensor | None, kind: Format) -> Blocks:
    """quantize_groups for formats with zero points, which become the minima of the result."""
    scale, zero = fit_scale_and_zero(x, weights, kind)
    levels = (x * inverse(scale) + zero + 0.5).clamp(0, kind.top).long().t()
    return Blocks(levels, scale, minima=zero.long().unsqueeze(1))


def round_scales(scale: Tensor, weights: Tensor | None, low: int, kind: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Round the scales [n] of groups to multiples of a float16 number for each block.

    weights: [n], how much their errors count, or None for no search. Returns the whole numbers [b, P] int64, from 0 on,
    the float16 numbers [b], and their products [n] in float32.
    """
    shape = (-1, kind.numbers // kind.group)
    in_blocks = scale.view(shape).t()
    d = fit_scale(in_blocks, None if weights is None else weights.view(shape).t(), low, kind.scale_top)[0].half()
    whole = nearest(in_blocks * inverse(d.float()), low, kind.scale_top)
    return (whole - low).t().long(), d, (whole * d.float()).t().flatten()


def nearest_levels(x: Tensor, scale: Tensor, minimum: Tensor | None, kind: Format) -> Tensor:
    """Return the levels of groups x [G, n] that are nearest, counted from 0 on: [b, numbers] int64.

    The higher one of two is taken, and in Q8_0, as in llama.cpp, the one farther from 0.
    """
    levels = (x if minimum is None else x - minimum) * inverse(scale)
    if kind.low == -kind.top:
        magnitude, whole = levels.abs(), levels.abs().floor()
        levels = torch.copysign(whole + (2 * (magnitude - whole)).floor(), levels) - kind.low
    else:
        levels = levels + (0.5 - kind.low)
    return levels.clamp(0, kind.top - kind.low).long().t().reshape(-1, kind.numbers)


def fit_scale(x: Tensor, weights: Tensor | None, low: int, top: int) -> tuple[Tensor, Tensor | None]:
    """Return scales [n] for which levels from low to top make the error of groups x [G, n] small.

    weights: how much their errors count; None makes the largest number the outermost level. The second result is how
    much a squared error of a scale counts.
    """
    largest = peak(x)
    if weights is None:
        return divided(largest.abs(), top) if low == -top else divided(largest, low or top), None
    scale, scale_weight, best = (torch.zeros_like(largest) for _ in range(3))
    for offset in OFFSETS:
        fitted, squares, gain = refine_scale(x, weights, inverse(largest, (low or top) + offset), low, top)
        is_better = gain > best
        scale, scale_weight = torch.where(is_better, fitted, scale), torch.where(is_better, squares, scale_weight)
        best = torch.where(is_better, gain, best)
    return scale, scale_weight


def refine_scale(
    x: Tensor, weights: Tensor, factor: Tensor, low: int | Tensor, top: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales [n], how much squared errors of them count, and their gains.

    factor: the reciprocals of the scales [n] with which the search begins. The weighted squared error of a group is the
    sum of weights * x * x less the gain.
    """
    for _ in range(ROUNDS):
        levels = nearest(x * factor, low, top)
        weighted = weights * levels
        products, squares = total(weighted * x), total(weighted * levels)
        factor = squares * inverse(products)
    scale = products * inverse(squares)
    return scale, squares, scale * products


def fit_scale_and_minimum(x: Tensor, weights: Tensor | None, kind: Format) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return scales, the weights of their errors and minima [n] that make the error of groups x [G, n] small.

    weights: how much their errors count; None makes the least number level 0 and the largest one the top.
    """
    low, span = bounds(x, kind)
    scale, minimum = divided(span, kind.top), low
    if weights is None:
        return scale, None, minimum
    sum_w, sum_x = total(weights), total(weights * x)
    levels = nearest((x - low) * inverse(span, kind.top), 0, kind.top)
    scale_weight, best = total(weights * levels * levels), squared_error(x, weights, levels, scale, minimum)
    for offset in OFFSETS:
        factor, b = inverse(span, kind.top + offset), low
        for _ in range(ROUNDS):
            levels = nearest((x - b) * factor, 0, kind.top)
            weighted = weights * levels
            sum_l, sum_ll, sum_lx = total(weighted), total(weighted * levels), total(weighted * x)
            per_determinant = inverse(sum_w * sum_ll - sum_l * sum_l)
            a = (sum_w * sum_lx - sum_x * sum_l) * per_determinant
            b = (sum_ll * sum_x - sum_l * sum_lx) * per_determinant
            if kind.scale_top:
                a, b = torch.where(b > 0, sum_lx * inverse(sum_ll), a), b.clamp(max=0.0)
            factor = inverse(a)
        error = squared_error(x, weights, levels, a, b)
        is_better = error < best
        scale, minimum = torch.where(is_better, a, scale), torch.where(is_better, b, minimum)
        scale_weight, best = torch.where(is_better, sum_ll, scale_weight), torch.where(is_better, error, best)
    return scale, scale_weight, minimum


def fit_scale_and_zero(x: Tensor, weights: Tensor | None, kind: Format) -> tuple[Tensor, Tensor]:
    """Return scales and whole zero points [n] that make the error of groups x [G, n] small.

    weights: how much their errors count; None makes the least number level 0 and the largest one the top.
    """
    low, span = bounds(x, kind)
    if weights is None:
        return divided(span, kind.top), nearest(-low * inverse(span, kind.top), 0, kind.top)
    scale, zero, best = (torch.zeros_like(low) for _ in range(3))
    for offset in OFFSETS:
        factor = inverse(span, kind.top + offset)
        shift = nearest(-low * factor, 0, kind.top)
        fitted, _, gain = refine_scale(x, weights, factor, -shift, kind.top - shift)
        is_better = gain > best
        scale, zero = torch.where(is_better, fitted, scale), torch.where(is_better, shift, zero)
        best = torch.where(is_better, gain, best)
    return scale, zero


def squared_error(x: Tensor, weights: Tensor, levels: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the weighted squared errors [n] of levels [G, n]."""
    difference = levels * scale + minimum - x
    return total(weights * difference * difference)
