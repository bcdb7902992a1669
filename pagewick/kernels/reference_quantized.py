"""Definition of products with quantized weights. T: tokens; N: outputs; K: inputs; B: numbers in a block.

Activations are quantized, too: to signed bytes in blocks of 32, each row by itself, so that a row of the result does
not depend on the other rows. The products within a block are whole numbers and add up exactly; the blocks' sums are
scaled and added in float32, in the order of the columns.

Source of the formats: https://github.com/ggml-org/ggml, ggml-common.h (layouts) and ggml-quants.c (meaning).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagewick.kernels.options import StoredQuantized

BLOCK: Final = 32


class Blocks(NamedTuple):
    """Quantized rows. values: [N, K / B, B] int8; scales: [N, K / B] float32. A number is the product of the two."""

    values: Tensor
    scales: Tensor

    def numbers(self) -> Tensor:
        """Return the numbers [N, K] in float32."""
        return (self.values.float() * self.scales.unsqueeze(-1)).flatten(1)


def unpack_q8_0(rows: Tensor) -> Blocks:
    """Read rows of block_q8_0 [N, bytes] uint8: a scale in float16, then 32 signed bytes."""
    blocks = rows.reshape(len(rows), -1, 2 + BLOCK)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
    return Blocks(blocks[..., 2:].contiguous().view(torch.int8), scales)


UNPACK: Final = {"Q8_0": unpack_q8_0}


def quantize_rows(x: Tensor) -> Blocks:
    """Quantize rows x [T, K] to signed bytes: the largest number of a block becomes 127 or -127.

    A number halfway between two is rounded to the even one. A block of zeros has the scale 0.
    """
    blocks = x.float().view(len(x), -1, BLOCK)
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
    left, right = quantize_rows(x.reshape(-1, weight.num_columns)), UNPACK[weight.format](weight.data)
    total = torch.zeros(len(left.scales), weight.num_rows, device=x.device)
    for block in range(left.scales.shape[1]):
        # Whole numbers below 2^24: exact in float32.
        products = left.values[:, block].float() @ right.values[:, block].float().t()
        total += products * (left.scales[:, block, None] * right.scales[:, block])
    if bias is not None:
        total += bias.float()
    result = total.to(out_dtype or x.dtype).view(*x.shape[:-1], weight.num_rows)
    return result if out is None else out.copy_(result)


def gather_quantized_rows(row_ids: Tensor, weight: StoredQuantized, dtype: torch.dtype) -> Tensor:
    """Return rows row_ids [n] int64 of a weight as numbers [n, K]. Raises IndexError for a row that does not exist."""
    return UNPACK[weight.format](weight.data[row_ids]).numbers().to(dtype)
