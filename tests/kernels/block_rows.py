"""Random rows of blocks in ggml's formats."""

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
# The largest finite number, the largest and smallest subnormal ones, the smallest normal one, one, and zeros.
EXTREME_HALVES: Final = (65504.0, 2**-14 - 2**-24, 2**-24, 2**-14, 1.0, 0.0, -0.0)


def random_rows(name: str, num_rows: int, num_columns: int, seed: int = 0, *, is_extreme: bool = False) -> Tensor:
    """Return rows of blocks [num_rows, bytes] uint8, with all values of a byte.

    Scales and minima are of both signs: small ones, and some 0; or extreme ones.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers, num_bytes, halves = LAYOUTS[name]
    shape = (num_rows, num_columns // numbers)
    blocks = torch.randint(0, 256, (*shape, num_bytes), generator=generator, dtype=torch.uint8)
    for start in halves:
        if is_extreme:
            choices = torch.tensor([*EXTREME_HALVES, *(-value for value in EXTREME_HALVES)])
            scales = choices[torch.randint(0, len(choices), shape, generator=generator)]
        else:
            scales = (torch.rand(shape, generator=generator) - 0.5) * 0.04
            scales[torch.rand(shape, generator=generator) < 0.05] = 0.0
        blocks[..., start : start + 2] = scales.half().unsqueeze(-1).view(torch.uint8)
    return blocks.flatten(1)
