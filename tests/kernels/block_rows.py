"""Random rows of blocks in ggml's types."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Numbers and bytes of a block, and where its float16 numbers begin, minima included.
LAYOUTS: Final = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
# Types without a product of their own.
EXPANDED: Final = {
    "IQ1_S": (256, 50, (0,)),
    "IQ1_M": (256, 56, ()),
    "IQ2_XXS": (256, 66, (0,)),
    "IQ2_XS": (256, 74, (0,)),
    "IQ2_S": (256, 82, (0,)),
    "IQ3_XXS": (256, 98, (0,)),
    "IQ3_S": (256, 110, (0,)),
    "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)),
    "TQ1_0": (256, 54, (52,)),
    "TQ2_0": (256, 66, (64,)),
    "MXFP4": (32, 17, ()),
    "NVFP4": (64, 36, ()),
}
# Numbers of other bytes that are scales: the first of a block, and their usual values.
_SCALE_BYTES: Final = {"MXFP4": (1, 118, 122), "NVFP4": (4, 4, 20)}
# The largest finite number, the largest and smallest subnormal ones, the smallest normal one, one, and zeros.
EXTREME_HALVES: Final = (65504.0, 2**-14 - 2**-24, 2**-24, 2**-14, 1.0, 0.0, -0.0)


def random_rows(name: str, num_rows: int, num_columns: int, seed: int = 0, *, is_extreme: bool = False) -> Tensor:
    """Return rows of blocks [num_rows, bytes] uint8, with all values of a byte.

    Scales and minima are of both signs: small ones, and some 0; or extreme ones.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers, num_bytes, halves = {**LAYOUTS, **EXPANDED}[name]
    shape = (num_rows, num_columns // numbers)
    blocks = torch.randint(0, 256, (*shape, num_bytes), generator=generator, dtype=torch.uint8)
    for start in halves:
        blocks[..., start : start + 2] = _random_halves(shape, generator, is_extreme=is_extreme)
    if name == "IQ1_M":
        _scatter_halves(blocks, _random_halves(shape, generator, is_extreme=is_extreme))
    if name in _SCALE_BYTES and not is_extreme:
        count, low, high = _SCALE_BYTES[name]
        blocks[..., :count] = torch.randint(low, high, (*shape, count), generator=generator, dtype=torch.uint8)
    return blocks.flatten(1)


def _random_halves(shape: tuple[int, int], generator: torch.Generator, *, is_extreme: bool) -> Tensor:
    if is_extreme:
        choices = torch.tensor([*EXTREME_HALVES, *(-value for value in EXTREME_HALVES)])
        scales = choices[torch.randint(0, len(choices), shape, generator=generator)]
    else:
        scales = (torch.rand(shape, generator=generator) - 0.5) * 0.04
        scales[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return scales.half().unsqueeze(-1).view(torch.uint8)


def _scatter_halves(blocks: Tensor, halves: Tensor) -> None:
    """Put the half bytes of scales [N, B, 2] into the upper halves of the last four words of IQ1_M's blocks."""
    for index in range(4):
        part = halves[..., index // 2] >> 4 * (index % 2) & 15
        byte = blocks[..., 49 + 2 * index]
        byte.copy_(byte & 15 | part << 4)
