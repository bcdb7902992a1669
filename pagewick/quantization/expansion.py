"""ggml's types that have no product of their own. At load, they become codes of four bits with scales.

N: rows; B: blocks of a row. Before and after, a number is scale * level in float32, with the same bits: a level is one
of a few values, or a coordinate of a grid's point with its sign, and there are never more than sixteen. The format that
a type becomes says which code stands for which level (CODEBOOKS); in Q4_0 it is the level plus 8.
kernels/block_formats.py names the source of the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import torch
from torch import Tensor

from pagewick.kernels.block_formats import FP4_VALUES, fields, halves, parts
from pagewick.quantization.block_formats import BLOCK_FORMATS, EXPANSIONS
from pagewick.quantization.grids import grid_points

# Numbers that are expanded at a time; temporary memory is a few times as many bytes.
_CHUNK_SIZE: Final = 2**19
# Where codes stand for a coordinate and a sign, this bit is the sign. The code of a level in Q4_0 is the level plus 8.
_MINUS: Final = 8

Decoded = tuple[Tensor, Tensor]
"""Codes in uint8 and their scales in float32; both in the order of the columns, in any shape that begins with N."""


def expand(name: str, rows: Tensor, num_columns: int, factor: Tensor | None = None) -> Tensor:
    """Return rows of blocks [N, bytes] uint8 of the type `name` as rows of EXPANSIONS[name], [N, bytes] uint8.

    factor: all numbers are to be multiplied by this float32 number, whose products with scales are rounded to float32.
    """
    target = EXPANSIONS[name]
    numbers, num_bytes = BLOCK_FORMATS[target]
    scale_dtype = torch.float16 if target == "Q4_0" else torch.float32
    found = torch.empty((len(rows), num_columns // numbers, num_bytes), dtype=torch.uint8)
    step = max(1, _CHUNK_SIZE // num_columns)
    for first in range(0, len(rows), step):
        chunk = found[first : first + step]
        codes, scales = _DECODE[name](rows[first : first + step].contiguous())
        scales = scales if factor is None else scales * factor
        lower, upper = codes.reshape(*chunk.shape[:2], 2, numbers // 2).unbind(2)
        chunk[..., -numbers // 2 :] = lower | upper << 4
        chunk[..., : -numbers // 2] = scales.reshape(*chunk.shape[:2], -1).to(scale_dtype).view(torch.uint8)
    return found.flatten(1)


def fp4_values(stored: Tensor) -> Tensor:
    """Return the values of E2M1, doubled, in bytes [n, C / 2] that hold two, the lower half first: [n, C] int8."""
    table = torch.tensor(FP4_VALUES, dtype=torch.int8)
    pairs = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)
    return table.index_select(0, pairs.flatten().int()).view(pairs.shape)


def _decode_iq4_xs(rows: Tensor) -> Decoded:
    scales, upper, lower, qs = fields(rows, 2, 2, 4, 128)
    group_scales = (parts(lower, 4, 1) | parts(upper, 2, 1) << 4).view(torch.int8) - 32
    return parts(qs, 4, 16), halves(scales).unsqueeze(-1) * group_scales


def _decode_nvfp4(rows: Tensor) -> Decoded:
    scales, qs = fields(rows, 4, 32)
    return parts(qs, 4, 8), _e4m3_halves()[scales.int()]


def _decode_tq1_0(rows: Tensor) -> Decoded:
    """Each byte holds five digits of base 3, which multiplications by 3 bring to its top; `qh` holds four."""
    first, second, qh, scales = fields(rows, 32, 16, 4, 2)
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).view(-1, 1)
    sizes = ((first, 5), (second, 5), (qh, 4))
    digits = torch.cat([(part.unsqueeze(-2) * powers[:count]).flatten(-2) for part, count in sizes], dim=-1)
    return ((digits.short() * 3) >> 8).to(torch.uint8) + 7, halves(scales).repeat_interleave(8, dim=1)


def _decode_tq2_0(rows: Tensor) -> Decoded:
    qs, scales = fields(rows, 64, 2)
    return parts(qs, 2, 32) + 7, halves(scales).repeat_interleave(8, dim=1)


def _decode_iq2_xxs(rows: Tensor) -> Decoded:
    scales, groups = fields(rows, 2, 64)
    # For 32 numbers, four bytes with an index each, and a word with four times seven bits of signs and a scale.
    indices, words = torch.split(torch.unflatten(groups, -1, (8, 8)), 4, -1)
    signs, group_scales = _signs_and_scales(words.flatten(-2))
    return _points("IQ2_XXS", indices.flatten(-2)) | signs, _odd_multiples(scales, group_scales) / 8


def _decode_iq2_xs(rows: Tensor) -> Decoded:
    scales, qs, group_scales = fields(rows, 2, 64, 8)
    words = _words(qs)
    codes = _points("IQ2_XS", words & 511) | _look_up(_even_signs(), words >> 9)
    return codes, _odd_multiples(scales, parts(group_scales, 4, 1)) / 8


def _decode_iq2_s(rows: Tensor) -> Decoded:
    scales, qs, signs, qh, group_scales = fields(rows, 2, 32, 32, 8, 8)
    codes = _points("IQ2_S", qs.int() | parts(qh, 2, 1).int() << 8) | _look_up(_signs(), signs)
    return codes, _odd_multiples(scales, parts(group_scales, 4, 1)) / 8


def _decode_iq3_xxs(rows: Tensor) -> Decoded:
    scales, qs, words = fields(rows, 2, 64, 32)
    signs, group_scales = _signs_and_scales(words)
    return _points("IQ3_XXS", qs) | signs, _odd_multiples(scales, group_scales) / 4


def _decode_iq3_s(rows: Tensor) -> Decoded:
    scales, qs, qh, signs, group_scales = fields(rows, 2, 64, 8, 32, 4)
    codes = _points("IQ3_S", qs.int() | parts(qh, 1, 1).int() << 8) | _look_up(_signs(), signs)
    return codes, _odd_multiples(scales, parts(group_scales, 4, 1))


def _decode_iq1_s(rows: Tensor) -> Decoded:
    """Numbers are a point's coordinates plus or minus an eighth."""
    scales, qs, qh = fields(rows, 2, 32, 16)
    words = _words(qh)
    upper = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32)) & 7
    points = _points("IQ1_S", qs.int() | upper.flatten(-2) << 8)
    return _shifted(points, words >> 15), _odd_multiples(scales, words >> 12 & 7) / 8


def _decode_iq1_m(rows: Tensor) -> Decoded:
    """As IQ1_S, with a scale for each 16 numbers, and a sign for each eight. The block's scale is in four pieces."""
    qs, qh, group_words = fields(rows, 32, 16, 8)
    words, nibbles = _words(group_words), parts(qh, 4, 1).int()
    pieces = words >> 12 << torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    scales = pieces.sum(-1).short().view(torch.uint8).view(*pieces.shape[:2], 2)
    group_scales = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32)) & 7
    points = _points("IQ1_S", qs.int() | (nibbles & 7) << 8)
    return _shifted(points, nibbles >> 3), _odd_multiples(scales, group_scales.flatten(-2)) / 8


_DECODE: Final[Mapping[str, Callable[[Tensor], Decoded]]] = {
    "IQ1_S": _decode_iq1_s,
    "IQ1_M": _decode_iq1_m,
    "IQ2_XXS": _decode_iq2_xxs,
    "IQ2_XS": _decode_iq2_xs,
    "IQ2_S": _decode_iq2_s,
    "IQ3_XXS": _decode_iq3_xxs,
    "IQ3_S": _decode_iq3_s,
    "IQ4_XS": _decode_iq4_xs,
    "TQ1_0": _decode_tq1_0,
    "TQ2_0": _decode_tq2_0,
    "NVFP4": _decode_nvfp4,
}


def _words(data: Tensor) -> Tensor:
    """Return numbers of 16 bits [N, B, 2 n] uint8 as [N, B, n] int32, 0 or more."""
    return data.contiguous().view(torch.int16).int() & 0xFFFF


def _look_up(table: Tensor, indices: Tensor) -> Tensor:
    """Return rows of a table [m, 4 or 8] uint8 for indices [N, B, n]: [N, B, 4 n or 8 n]."""
    words = table.view(torch.int64 if table.shape[1] == 8 else torch.int32).squeeze(-1)
    return _select(words, indices).view(torch.uint8)


def _select(table: Tensor, indices: Tensor) -> Tensor:
    """Return numbers of a table [m] for indices of any shape. index_select takes a fifth of the time of table[...]."""
    return table.index_select(0, indices.int().flatten()).view(indices.shape)


def _points(name: str, indices: Tensor) -> Tensor:
    """Return the points of a grid: for each coordinate, which of the grid's values it is."""
    return _look_up(grid_points(name), indices)


def _odd_multiples(scales: Tensor, group_scales: Tensor) -> Tensor:
    """Return float16 scales [N, B, 2] uint8 times 2 g + 1, for each g of [N, B, n]. Exact in float32."""
    return halves(scales).unsqueeze(-1) * (2 * group_scales.int() + 1)


def _shifted(points: Tensor, signs: Tensor) -> Tensor:
    """Return the codes of points [N, B, n] plus an eighth, or minus an eighth for neighbours with a sign [N, B, m]."""
    return (
        torch.unflatten(points, -1, (signs.shape[-1], -1)) | (signs.to(torch.uint8) * _MINUS).unsqueeze(-1)
    ).flatten(2)


def _signs_and_scales(data: Tensor) -> Decoded:
    """Return the signs and the scales 0 .. 15 that each four bytes of [N, B, 4 n] hold: [N, B, 32 n], [N, B, n]."""
    words = data.contiguous().view(torch.int32)
    indices = (words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21], dtype=torch.int32)) & 127
    return _look_up(_even_signs(), indices.flatten(-2)), words >> 28 & 15


@cache
def _signs() -> Tensor:
    """A sign for each bit of a byte, 0 or _MINUS: [256, 8] uint8."""
    bits = torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1
    return (_MINUS * bits).to(torch.uint8)


@cache
def _even_signs() -> Tensor:
    """Signs of eight numbers, of which an even number are negative, so that seven bits tell all: [128, 8] uint8."""
    signs = _signs()[:128].clone()
    signs[:, 7] = (signs[:, :7] // _MINUS).sum(dim=-1) % 2 * _MINUS
    return signs


@cache
def _e4m3_halves() -> Tensor:
    """Half of each number in E4M3, without its sign, by its byte: [256] float32. A positive NaN is 0, as in ggml."""
    exponents, mantissas = torch.arange(256) >> 3 & 15, torch.arange(256) & 7
    normal = (8 + mantissas) * 2.0 ** (exponents - 11)
    found = torch.where(exponents > 0, normal, mantissas * 2.0**-10)
    found[0x7F] = 0.0
    return found
