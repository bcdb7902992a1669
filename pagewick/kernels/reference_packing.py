"""Packs quantized numbers into the bytes of blocks; a part of reference_quantizers.py.

Dimensions: b blocks, P groups in a block.
Source of the layouts, those of int4 formats excepted: https://github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """Quantized blocks. levels, scales and minima count from 0 on and are int64: [b, numbers] and [b, P].

    d, dmin: [b] float16. Blocks of one group have no scales and minima, and dmin is the minimum, not its negative. In
    int4 formats, d is float32, and minima are zero points.
    """

    levels: Tensor
    d: Tensor
    dmin: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None


def interleaved(parts: Tensor, bits: int) -> Tensor:
    """Return bytes [b, ...] uint8 of parts [b, ..., parts, bytes]: each byte has `bits` bits of every part."""
    shifts = torch.arange(parts.shape[-2], device=parts.device).unsqueeze(-1) * bits
    return (parts << shifts).sum(-2).flatten(1).to(torch.uint8)


def halves(*numbers: Tensor | None) -> list[Tensor]:
    """Return float16 numbers [b] as bytes [b, 2] each."""
    return [number.unsqueeze(1).view(torch.uint8) for number in numbers if number is not None]


def pack_4_bit(blocks: Blocks) -> Tensor:
    """Write Q4_0 and Q4_1: scale, minimum, the low half of the levels and the high half in one byte each."""
    return torch.cat([*halves(blocks.d, blocks.dmin), interleaved(blocks.levels.view(-1, 2, 16), 4)], 1)


def pack_5_bit(blocks: Blocks) -> Tensor:
    """Write Q5_0 and Q5_1: as with 4 bits, with the fifth bit of all levels before the others."""
    high = interleaved((blocks.levels >> 4).view(-1, 4, 8, 1), 1)
    low = interleaved((blocks.levels & 15).view(-1, 2, 16), 4)
    return torch.cat([*halves(blocks.d, blocks.dmin), high, low], 1)


def pack_q8_0(blocks: Blocks) -> Tensor:
    """Write Q8_0: scale, signed bytes."""
    return torch.cat([*halves(blocks.d), (blocks.levels - 127).to(torch.int8).view(torch.uint8)], 1)


def pack_q2_k(blocks: Blocks) -> Tensor:
    """Write Q2_K: scales and minima of 4 bits, levels in four parts of each half, both factors."""
    assert blocks.scales is not None and blocks.minima is not None
    scales = interleaved(torch.stack((blocks.scales, blocks.minima), 1), 4)
    levels = interleaved(blocks.levels.view(-1, 2, 4, 32), 2)
    return torch.cat([scales, levels, *halves(blocks.d, blocks.dmin)], 1)


def pack_q3_k(blocks: Blocks) -> Tensor:
    """Write Q3_K: the third bits of the levels, the others, scales of 4 + 2 bits, the factor."""
    assert blocks.scales is not None
    high = interleaved((blocks.levels >> 2).view(-1, 8, 32), 1)
    low = interleaved((blocks.levels & 3).view(-1, 2, 4, 32), 2)
    scales = interleaved((blocks.scales & 15).view(-1, 2, 8), 4)
    return torch.cat([high, low, scales, interleaved((blocks.scales >> 4).view(-1, 4, 4), 2), *halves(blocks.d)], 1)


def scales_of_six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Return [b, 12] uint8: the first four scales, the first four minima, then four bits of the others.

    The upper two bits of the others are stored in the highest bits of the first eight bytes.
    """
    first = torch.stack((scales[:, :4], minima[:, :4]), 1) | (torch.stack((scales[:, 4:], minima[:, 4:]), 1) >> 4 << 6)
    second = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return torch.cat([first.flatten(1), second], 1).to(torch.uint8)


def pack_q4_k(blocks: Blocks) -> Tensor:
    """Write Q4_K: both factors, scales and minima, levels in two parts of each quarter."""
    assert blocks.scales is not None and blocks.minima is not None
    scales = scales_of_six_bits(blocks.scales, blocks.minima)
    return torch.cat([*halves(blocks.d, blocks.dmin), scales, interleaved(blocks.levels.view(-1, 4, 2, 32), 4)], 1)


def pack_q5_k(blocks: Blocks) -> Tensor:
    """Write Q5_K: as Q4_K, with the fifth bit of all levels before the others."""
    assert blocks.scales is not None and blocks.minima is not None
    scales = scales_of_six_bits(blocks.scales, blocks.minima)
    high = interleaved((blocks.levels >> 4).view(-1, 8, 32), 1)
    low = interleaved((blocks.levels & 15).view(-1, 4, 2, 32), 4)
    return torch.cat([*halves(blocks.d, blocks.dmin), scales, high, low], 1)


def pack_q6_k(blocks: Blocks) -> Tensor:
    """Write Q6_K: four bits of the levels in two parts of each half, the other two in four, scales, the factor."""
    assert blocks.scales is not None
    low = interleaved((blocks.levels & 15).view(-1, 2, 2, 64), 4)
    high = interleaved((blocks.levels >> 4).view(-1, 2, 4, 32), 2)
    scales = (blocks.scales - 128).to(torch.int8).view(torch.uint8)
    return torch.cat([low, high, scales, *halves(blocks.d)], 1)


def pack_int4(blocks: Blocks) -> Tensor:
    """Write an int4 format: scale, zero point, the low half of every 32 levels and the high half in one byte each."""
    assert blocks.minima is not None
    levels = torch.unflatten(blocks.levels, 1, (blocks.levels.shape[1] // 32, 2, 16))
    scales = blocks.d.unsqueeze(1).view(torch.uint8)
    return torch.cat([scales, blocks.minima.to(torch.uint8), interleaved(levels, 4)], 1)


PACK: Final[Mapping[str, Callable[[Blocks], Tensor]]] = {
    "Q4_0": pack_4_bit,
    "Q4_1": pack_4_bit,
    "Q5_0": pack_5_bit,
    "Q5_1": pack_5_bit,
    "Q8_0": pack_q8_0,
    "Q2_K": pack_q2_k,
    "Q3_K": pack_q3_k,
    "Q4_K": pack_q4_k,
    "Q5_K": pack_q5_k,
    "Q6_K": pack_q6_k,
    **dict.fromkeys(("int4_g32", "int4_g64", "int4_g128"), pack_int4),
}
# Where a block has its float16 numbers.
HALVES: Final = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
