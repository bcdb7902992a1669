"""The layout of quantized weights on GPUs: rows of planes. Imports no Triton. K: columns; G: columns of a group.

A format's levels, scales and minima lie apart, each in its plane of the row, so that neighbouring threads read
neighbouring words:

    low bits of all levels | high bits | scales of groups | minima of groups | scales of blocks | minima of blocks

Levels count from 0 on and lie in the order of the columns, from the lowest bits of a byte on. Each plane begins at a
multiple of 16 bytes. A number is scale * group_scale * (level - offset) - minimum * group_minimum; in int4 formats, the
offset of a group is its zero point, which lies in the plane of minima; levels of fp8 formats are E4M3, those of MXFP4
E2M1, and those of other formats with a codebook are codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pagewick.kernels.block_formats import CODEBOOKS, Blocks, fields, parts, unpack
from pagewick.kernels.dispatch import QuantizedLayout

ALIGNMENT: Final = 16
# Bytes of blocks that are packed at a time. Levels of 32 bits and their sums take up to 48 times as many on the GPU,
# which at the end of loading has no more room than a step needs.
_BYTES_AT_ONCE: Final = 2**22
_CODES_OF_BLOCK: Final = 32
# Kinds of levels: numbers as they are, whole numbers, E4M3, E2M1, codes.
PLAIN, WHOLE, E4M3, E2M1, CODES = range(5)
# Kinds of scales of groups: none; bytes 0 to 63; signed bytes; bytes of a scale and a minimum of four bits each; powers
# of two in E8M0, in place of scales of blocks.
NO_SCALES, BYTES, SIGNED_BYTES, NIBBLES, POWERS = range(5)
# Kinds of minima: none; of a block; of a block times that of a group; zero points of groups.
NO_MINIMA, OF_BLOCKS, OF_GROUPS, ZERO_POINTS = range(4)


@dataclass(frozen=True, slots=True)
class Format:
    """How a format's numbers are stored.

    block, group: columns that share a scale, and a scale of groups. low_bits, high_bits: of a level. offset: is taken
    from levels. is_half: whether scales of blocks are float16, else float32. codebook: the levels of codes.
    """

    block: int
    group: int
    low_bits: int
    high_bits: int = 0
    offset: int = 0
    levels: int = WHOLE
    group_scales: int = NO_SCALES
    minima: int = NO_MINIMA
    is_half: bool = True
    codebook: tuple[int, ...] = (0,) * 16

    @property
    def codebook_words(self) -> tuple[int, int]:
        """The codebook as the bytes of two signed words of 64 bits, the first level in the lowest bits."""
        data = bytes(level & 0xFF for level in self.codebook)
        return int.from_bytes(data[:8], "little", signed=True), int.from_bytes(data[8:], "little", signed=True)


@dataclass(frozen=True, slots=True)
class Planes:
    """Where the planes of a row of num_columns begin, in bytes from the row's beginning, and the bytes of a row."""

    high: int
    group_scales: int
    group_minima: int
    scales: int
    minima: int
    row_bytes: int


def _own(
    group: int, bits: int, levels: int = WHOLE, *, offset: int = 0, group_scales: int = NO_SCALES,
    minima: int = NO_MINIMA,
) -> Format:  # fmt: skip
    return Format(
        group, group, bits, offset=offset, levels=levels, group_scales=group_scales, minima=minima, is_half=False
    )


def _codes(name: str) -> Format:
    return Format(int(name[-2:]), int(name[-2:]), 4, levels=CODES, is_half=False, codebook=CODEBOOKS[name])


FORMATS: Final[Mapping[str, Format]] = {
    "Q4_0": Format(32, 32, 4, offset=8),
    "Q4_1": Format(32, 32, 4, minima=OF_BLOCKS),
    "Q5_0": Format(32, 32, 4, 1, offset=16),
    "Q5_1": Format(32, 32, 4, 1, minima=OF_BLOCKS),
    "Q8_0": Format(32, 32, 8, offset=128),
    "Q2_K": Format(256, 16, 2, group_scales=NIBBLES, minima=OF_GROUPS),
    "Q3_K": Format(256, 16, 2, 1, offset=4, group_scales=SIGNED_BYTES),
    "Q4_K": Format(256, 32, 4, group_scales=BYTES, minima=OF_GROUPS),
    "Q5_K": Format(256, 32, 4, 1, group_scales=BYTES, minima=OF_GROUPS),
    "Q6_K": Format(256, 16, 4, 2, offset=32, group_scales=SIGNED_BYTES),
    "IQ4_NL": Format(32, 32, 4, levels=CODES, codebook=CODEBOOKS["IQ4_NL"]),
    "MXFP4": _own(32, 4, E2M1, group_scales=POWERS),
    "int8_g32": _own(32, 8, offset=128),
    **{f"int4_g{group}": _own(group, 4, minima=ZERO_POINTS) for group in (32, 64, 128)},
    **{f"fp8_g{group}": _own(group, 8, E4M3) for group in (32, 128)},
    **{name: _codes(name) for name in CODEBOOKS if name not in ("MXFP4", "IQ4_NL")},
}


def planes(name: str, num_columns: int) -> Planes:
    """Return where the planes of a row lie."""
    form = FORMATS[name]
    groups, blocks = num_columns // form.group, num_columns // form.block
    has_group_minima = form.minima == ZERO_POINTS or (form.minima == OF_GROUPS and form.group_scales != NIBBLES)
    sizes = (
        num_columns * form.low_bits // 8,
        num_columns * form.high_bits // 8,
        groups * (form.group_scales != NO_SCALES),
        groups * has_group_minima,
        blocks * (0 if form.group_scales == POWERS else 2 if form.is_half else 4),
        blocks * 2 * (form.minima in (OF_BLOCKS, OF_GROUPS)),
    )
    ends, end = [], 0
    for size in sizes:
        end += -(-size // ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return Planes(*ends)


def packed_shape(name: str, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Return [num_rows, bytes of a row] of a packed weight."""
    return num_rows, planes(name, num_columns).row_bytes


def pack_rows(name: str, rows: Tensor, weight: Tensor, first_row: int) -> None:
    """Store rows of blocks [n, bytes] uint8 in a packed weight [num_rows, bytes] from `first_row` on, on its device.

    Raises ValueError if they do not fit.
    """
    form, rows = FORMATS[name], rows.to(weight.device)
    if rows.ndim != 2 or rows.dtype != torch.uint8 or not 0 <= first_row <= len(weight) - len(rows):
        raise ValueError(f"{rows.dtype} rows {list(rows.shape)} do not fit into a packed weight {list(weight.shape)}")
    step = max(1, _BYTES_AT_ONCE // max(1, rows.shape[1]))
    targets = torch.split(weight[first_row : first_row + len(rows)], step)
    for some, target in zip(torch.split(rows, step), targets, strict=True):
        _pack(name, form, some, target)


def row_scales(name: str, weight: Tensor, num_columns: int) -> Tensor | None:
    """Return the scales [num_rows] float32 of a packed weight in FP8 whose rows have one each, else None.

    Weights with sizes that torch._scaled_mm does not take are left out, too. Waits for the device.
    """
    if FORMATS[name].levels != E4M3 or num_columns == 0 or len(weight) % ALIGNMENT or num_columns % ALIGNMENT:
        return None
    first = planes(name, num_columns).scales // 4
    scales = weight.view(torch.float32)[:, first : first + num_columns // FORMATS[name].group]
    return scales[:, 0].clone() if len(weight) and bool((scales == scales[:, :1]).all()) else None


def _pack(name: str, form: Format, rows: Tensor, target: Tensor) -> None:
    """Store rows of blocks as the rows `target` of a packed weight. Raises ValueError if they do not fit."""
    blocks = unpack(name, rows)
    levels = _levels(name, form, rows, blocks)
    place = planes(name, levels.shape[1])
    if place.row_bytes != target.shape[1]:
        raise ValueError(f"rows of {levels.shape[1]} columns do not fit into a packed weight {list(target.shape)}")
    _store(target, 0, _packed_bits(levels & (1 << form.low_bits) - 1, form.low_bits))
    if form.high_bits:
        _store(target, place.high, _packed_bits(levels >> form.low_bits, form.high_bits))
    if form.group_scales == POWERS:
        _store(target, place.group_scales, fields(rows, 1, form.group // 2)[0])
        return
    _store_groups(target, place, form, blocks)
    if form.minima == ZERO_POINTS:
        _store(target, place.group_minima, fields(rows, 4, 1, form.group // 2)[1])
    # A scale that is repeated because block_formats.py has blocks of 32 is stored once.
    step = form.block // blocks.levels.shape[-1]
    dtype = torch.float16 if form.is_half else torch.float32
    _store(target, place.scales, blocks.scales[:, :: max(1, step)].to(dtype).contiguous().view(torch.uint8))
    if blocks.minima is not None:
        _store(target, place.minima, blocks.minima.to(dtype).contiguous().view(torch.uint8))


def _levels(name: str, form: Format, rows: Tensor, blocks: Blocks) -> Tensor:
    """Return levels from 0 on, or E4M3 bytes, or codes: [n, K] int32."""
    if form.levels == E4M3:
        return fields(rows, 4, form.group)[1].flatten(1).int()
    if form.levels in (E2M1, CODES):
        scale_bytes = 1 if form.levels == E2M1 else (2 if form.is_half else 4) * (_CODES_OF_BLOCK // form.group)
        return parts(fields(rows, scale_bytes, _CODES_OF_BLOCK // 2)[1], 4, 16).flatten(1).int()
    levels = blocks.levels.int()
    if form.minima == ZERO_POINTS:
        zeros = fields(rows, 4, 1, form.group // 2)[1]
        return levels.flatten(1) + zeros.int().flatten(1).repeat_interleave(form.group, dim=1)
    return levels.flatten(1) + form.offset


def _packed_bits(levels: Tensor, bits: int) -> Tensor:
    """Return bytes [n, K * bits / 8] of levels [n, K] below 2^bits, the first in the lowest bits of a byte."""
    parts = torch.unflatten(levels, 1, (-1, 8 // bits))
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=levels.device)
    return (parts << shifts).sum(-1).to(torch.uint8)


def _store_groups(target: Tensor, place: Planes, form: Format, blocks: Blocks) -> None:
    scales, minima = blocks.group_scales, blocks.group_minima
    if form.group_scales == NIBBLES:
        assert scales is not None and minima is not None
        _store(target, place.group_scales, scales | minima << 4)
        return
    if scales is not None:
        _store(target, place.group_scales, scales)
    if minima is not None:
        _store(target, place.group_minima, minima)


def _store(target: Tensor, first: int, plane: Tensor) -> None:
    """Store a plane [n, ...] of bytes in rows [n, bytes] from a byte on."""
    content = plane.reshape(len(target), -1).view(torch.uint8)
    target[:, first : first + content.shape[1]].copy_(content)


LAYOUTS: Final = {
    name: QuantizedLayout(partial(packed_shape, name), partial(pack_rows, name), partial(row_scales, name))
    for name in FORMATS
}
