"""Definition of products with quantized weights. T: tokens; N: outputs; K: inputs; B: blocks of a row; S, G: see
block_formats.py.

Activations are quantized, too: to signed bytes in blocks of 32, or of 256 for weights of a K type, each row by itself,
so that a row of the result does not depend on the other rows. The products within a block of weights are whole numbers
and add up exactly, scales of groups included. The blocks' sums are scaled and added in float32, in the order of the
columns; the contribution of a block's minimum follows its products.

In fp8 formats, activations are not quantized, but rounded to bfloat16. The sum of a block's products is rounded to
float32, here once (native products round it after each one or two products), multiplied with the scale of weights, and
added.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor

from pagewick.kernels.block_formats import Blocks, unpack
from pagewick.kernels.options import StoredQuantized

BLOCK: Final = 32
K_BLOCK: Final = 256
# The largest number of E4M3.
E4M3_MAX: Final = 448.0


def quantize_rows(x: Tensor, block_size: int = BLOCK) -> Blocks:
    """Quantize rows x [T, K] to signed bytes: the largest number of a block becomes 127 or -127.

    A number halfway between two is rounded to the even one. A block of zeros has the scale 0.
    """
    blocks = torch.unflatten(x.float(), 1, (x.shape[1] // block_size, block_size))
    largest = blocks.abs().amax(-1, keepdim=True)
    # A division: the operator would multiply by the reciprocal.
    factor = torch.where(largest > 0, torch.full_like(largest, 127.0).div(largest), 0.0)
    return Blocks((blocks * factor).round().to(torch.int8), (largest / 127.0).squeeze(-1))


def quantized_linear(
    x: Tensor,
    weight: StoredQuantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [..., K] times the transposed weight, plus bias [N]: [..., N] in out_dtype, or x's dtype.

    out: a tensor to write the result to. Raises ValueError if x does not fit the weight.
    """
    if x.shape[-1] != weight.num_columns:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {weight.num_columns} columns")
    rows, right = x.reshape(prod(x.shape[:-1]), weight.num_columns), unpack(weight.format, weight.data)
    add_blocks = _add_floats if right.levels.is_floating_point() else _add_scaled
    total = add_blocks(rows, right, torch.zeros(len(rows), weight.num_rows, device=x.device))
    if bias is not None:
        total += bias.float()
    result = total.to(out_dtype or x.dtype).view(*x.shape[:-1], weight.num_rows)
    return result if out is None else out.copy_(result)


def gather_quantized_rows(row_ids: Tensor, weight: StoredQuantized, dtype: torch.dtype) -> Tensor:
    """Return rows row_ids [n] int64 of a weight as numbers [n, K]. Raises IndexError for a row that does not exist."""
    return unpack(weight.format, weight.data[row_ids]).numbers().to(dtype)


def quantize_activations(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round x [T, K] to E4M3 with a scale for each group of columns: levels [T, K], scales [T, K / group_size] float32.

    A number is level times scale. The largest number of a group becomes 448 or -448, the largest of E4M3; others are
    rounded to the nearest, ties to even. A group of zeros has the scale 0, and one with a number that is not finite the
    scale NaN and levels of 0.
    """
    groups = torch.unflatten(x.float(), 1, (x.shape[1] // group_size, group_size))
    largest = groups.abs().amax(-1)
    # A division: the operator would multiply by the reciprocal.
    scales = largest.div(torch.full_like(largest, E4M3_MAX))
    divisors = torch.where(largest.isfinite() & (scales > 0), scales, 1.0)
    levels = torch.where(largest.isfinite().unsqueeze(-1), groups / divisors.unsqueeze(-1), 0.0)
    levels = levels.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return levels.flatten(1), torch.where(largest.isfinite(), scales, torch.nan)


def _add_scaled(x: Tensor, right: Blocks, total: Tensor) -> Tensor:
    """Return total [T, N] plus the product with x, whose blocks are at least as large as those of weights."""
    size, num_blocks = right.levels.shape[-1], right.levels.shape[1]
    left = quantize_rows(x, max(size, BLOCK))
    # A block of 16 columns is half of one of x.
    left_levels = left.levels.reshape(len(x), num_blocks, size)
    left_scales = left.scales.repeat_interleave(max(size, BLOCK) // size, dim=1)
    right_levels = _whole_numbers(right)
    for block in range(num_blocks):
        scales = left_scales[:, block, None] * right.scales[:, block]
        total += _product(left_levels[:, block], right_levels[:, block]).float() * scales
        if right.minima is not None:
            minima = left_scales[:, block, None] * right.minima[:, block]
            total -= _minima(left_levels[:, block], right, block) * minima
    return total


def _add_floats(x: Tensor, right: Blocks, total: Tensor) -> Tensor:
    """_add_scaled for fp8 formats. Sums are added in float64, so that the order does not matter."""
    size, num_blocks = right.levels.shape[-1], right.levels.shape[1]
    left = x.bfloat16().double().reshape(len(x), num_blocks, size)
    for block in range(num_blocks):
        total += (left[:, block] @ right.levels[:, block].double().t()).float() * right.scales[:, block]
    return total


def _whole_numbers(blocks: Blocks) -> Tensor:
    """Return levels times the scales of their groups: [N, B, S] int16, at most 2^12."""
    levels = blocks.levels.short()
    if blocks.group_scales is None:
        return levels
    num_groups = blocks.group_scales.shape[-1]
    return (torch.unflatten(levels, -1, (num_groups, -1)) * blocks.group_scales.unsqueeze(-1)).flatten(-2)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [T, S] times the transposed right [N, S], whole numbers up to 2^7 and 2^12: [T, N] int32.

    Sums of whole numbers below 2^24 are exact in float32, so that the upper and lower bits of `right` have a product
    each: 2^7 * 2^6 * 256 is less.
    """
    upper, lower = ((left.float() @ part.float().t()).int() for part in (right >> 6, right & 63))
    return upper * 64 + lower


def _minima(left: Tensor, right: Blocks, block: int) -> Tensor:
    """Return left [T, S], summed by group, times the group minima [N, G] of a block of `right`: [T, N]. Exact."""
    if right.group_minima is None:
        return left.sum(-1, keepdim=True).float()
    group_minima = right.group_minima[:, block].float()
    sums = torch.unflatten(left, -1, (group_minima.shape[-1], -1)).sum(-1)
    return sums.float() @ group_minima.t()
