"""Random rows of blocks in ggml's types, and in formats of Pagewick's own."""

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
    "MXFP4": (32, 17, ()),
    "IQ4_NL": (32, 18, (0,)),
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
    "IQ4_XS": (256, 136, (0,)),
    "TQ1_0": (256, 54, (52,)),
    "TQ2_0": (256, 66, (64,)),
    "NVFP4": (64, 36, ()),
}
# Formats that are no types of ggml's: numbers and bytes of a block, and how many float32 scales it begins with.
OWN: Final = {
    "int8_g32": (32, 36, 1),
    "int4_g32": (32, 21, 1),
    "int4_g64": (64, 37, 1),
    "int4_g128": (128, 69, 1),
    "fp8_g32": (32, 36, 1),
    "fp8_g128": (128, 132, 1),
    "iq4_g32": (32, 20, 1),
    "iq3_g32": (32, 20, 1),
    "iq3s_g32": (32, 20, 1),
    "iq2_g32": (32, 20, 1),
    "iq2_g16": (32, 24, 2),
    "iq1_g32": (32, 20, 1),
    "iq1_g16": (32, 24, 2),
    "fp4_g16": (32, 24, 2),
}
# Numbers of other bytes that are scales: the first of a block, their usual values, and extreme ones, with which no
# number overflows.
_SCALE_BYTES: Final = {"MXFP4": (1, (118, 122), (0, 252)), "NVFP4": (4, (4, 20), (0, 256))}
# The largest finite number, the largest and smallest subnormal ones, the smallest normal one, one, and zeros.
EXTREME_HALVES: Final = (65504.0, 2**-14 - 2**-24, 2**-24, 2**-14, 1.0, 0.0, -0.0)
EXTREME_FLOATS: Final = (3e38, 2**-126 - 2**-149, 2**-149, 2**-126, 1.0, 0.0, -0.0)


def random_rows(name: str, num_rows: int, num_columns: int, seed: int = 0, *, is_extreme: bool = False) -> Tensor:
    """Return rows of blocks [num_rows, bytes] uint8, with all values of a byte.

    Scales and minima are of both signs: small ones, and some 0; or extreme ones.
    """
    generator = torch.Generator().manual_seed(seed)
    if name in OWN:
        return _own_rows(name, num_rows, num_columns, generator, is_extreme=is_extreme)
    numbers, num_bytes, halves = {**LAYOUTS, **EXPANDED}[name]
    shape = (num_rows, num_columns // numbers)
    blocks = torch.randint(0, 256, (*shape, num_bytes), generator=generator, dtype=torch.uint8)
    for start in halves:
        blocks[..., start : start + 2] = _random_halves(shape, generator, is_extreme=is_extreme)
    if name == "IQ1_M":
        _scatter_halves(blocks, _random_halves(shape, generator, is_extreme=is_extreme))
    if name in _SCALE_BYTES:
        count, *choices = _SCALE_BYTES[name]
        low, high = choices[is_extreme]
        blocks[..., :count] = torch.randint(low, high, (*shape, count), generator=generator, dtype=torch.uint8)
    return blocks.flatten(1)


def _own_rows(name: str, num_rows: int, num_columns: int, generator: torch.Generator, *, is_extreme: bool) -> Tensor:
    numbers, num_bytes, num_scales = OWN[name]
    shape = (num_rows, num_columns // numbers)
    blocks = torch.randint(0, 256, (*shape, num_bytes), generator=generator, dtype=torch.uint8)
    scales = _random_scales((*shape, num_scales), EXTREME_FLOATS, generator, is_extreme=is_extreme)
    blocks[..., : 4 * num_scales] = scales.view(torch.uint8)
    if name.startswith("int4"):
        zeros = torch.tensor([0, 7, 8, 9, 15, 16, 255], dtype=torch.uint8)
        blocks[..., 4] = zeros[torch.randint(0, len(zeros), shape, generator=generator)]
        # Kernels multiply 256 columns in another way if one of their zero points is above 16: every second time here.
        usual = torch.arange(shape[1]) * OWN[name][0] // 256 % 2 == 1
        blocks[:, usual, 4] = blocks[:, usual, 4].clamp(max=16)
    if name.startswith("fp8"):
        levels = blocks[..., 4:]
        levels[levels & 127 == 127] = 0  # no NaN
    return blocks.flatten(1)


def _random_halves(shape: tuple[int, int], generator: torch.Generator, *, is_extreme: bool) -> Tensor:
    scales = _random_scales(shape, EXTREME_HALVES, generator, is_extreme=is_extreme)
    return scales.half().unsqueeze(-1).view(torch.uint8)


def _random_scales(
    shape: tuple[int, ...], extremes: tuple[float, ...], generator: torch.Generator, *, is_extreme: bool
) -> Tensor:
    if is_extreme:
        choices = torch.tensor([*extremes, *(-value for value in extremes)])
        return choices[torch.randint(0, len(choices), shape, generator=generator)]
    scales = (torch.rand(shape, generator=generator) - 0.5) * 0.04
    scales[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return scales


def _scatter_halves(blocks: Tensor, halves: Tensor) -> None:
    """Put the half bytes of scales [N, B, 2] into the upper halves of the last four words of IQ1_M's blocks."""
    for index in range(4):
        part = halves[..., index // 2] >> 4 * (index % 2) & 15
        byte = blocks[..., 49 + 2 * index]
        byte.copy_(byte & 15 | part << 4)
