"""Unpacks block formats, ggml's and others. N: rows; B: blocks of a row; S: numbers in a block; G: groups in a block.

A block's numbers are small whole numbers, the levels, with a scale in float16, and perhaps with a minimum. In the K
types, a block of 256 consists of groups of 16 or 32 numbers with whole scales and minima of their own. In MXFP4 and
IQ4_NL, a block of 32 has codes of four bits, which stand for levels (CODEBOOKS). MXFP4's scale is a power of two, E8M0.

The other formats are not ggml's. Their blocks begin with a float32 scale. In int8_g32, signed bytes follow. In
int4_g32, int4_g64 and int4_g128, a byte with the zero point follows, 0 to 255, and then levels of four bits, 32 after
32 as in Q4_0; a number is scale * (level - zero point). In fp8_g32 and fp8_g128, numbers in E4M3 follow, a byte each;
none is NaN. In the others of CODEBOOKS, 32 codes follow as in Q4_0, after a second scale if groups have 16 columns.

Source of ggml's formats: https://github.com/ggml-org/ggml, ggml-common.h (layouts) and ggml-quants.c (meaning); of E2M1
and E8M0: the Open Compute Project's specification of microscaling formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

# The numbers in E2M1, doubled, by code; scales are halved.
FP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The coordinates of ggml's grids; codes from 8 on stand for the same with a minus sign. Codes with the level 0 are
# unused.
_IQ3_VALUES: Final = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_IQ3S_VALUES: Final = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_IQ2_VALUES: Final = (8, 25, 43, *[0] * 5, -8, -25, -43, *[0] * 5)
# Eight times a coordinate -1, 0 or 1, plus one; from 8 on, minus one.
_IQ1_VALUES: Final = (-7, 1, 9, *[0] * 5, -9, -1, 7, *[0] * 5)
# The levels of formats with codes of four bits, by code.
CODEBOOKS: Final[Mapping[str, tuple[int, ...]]] = {
    "MXFP4": FP4_VALUES,
    "IQ4_NL": _IQ4_VALUES,
    "iq4_g32": _IQ4_VALUES,
    "iq3_g32": _IQ3_VALUES,
    "iq3s_g32": _IQ3S_VALUES,
    "iq2_g32": _IQ2_VALUES,
    "iq2_g16": _IQ2_VALUES,
    "iq1_g32": _IQ1_VALUES,
    "iq1_g16": _IQ1_VALUES,
    "fp4_g16": FP4_VALUES,
}


class Blocks(NamedTuple):
    """Quantized rows. A number is scale * group_scale * level - minimum * group_minimum.

    levels: [N, B, S] int8; in int4 formats int16, less zero points; in fp8 formats float32. scales, minima: [N, B]
    float32. group_scales, group_minima: [N, B, G] int8. Without group_scales, a block is one group whose scale is 1;
    without group_minima, minima are 0, or belong to that group.
    """

    levels: Tensor
    scales: Tensor
    group_scales: Tensor | None = None
    minima: Tensor | None = None
    group_minima: Tensor | None = None

    def numbers(self) -> Tensor:
        """Return the numbers [N, B * S] in float32."""
        scales = self._per_group(self.scales, self.group_scales)
        found = torch.unflatten(self.levels, -1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
        if self.minima is not None:
            found -= self._per_group(self.minima, self.group_minima).unsqueeze(-1)
        return found.flatten(1)

    @staticmethod
    def _per_group(values: Tensor, of_groups: Tensor | None) -> Tensor:
        return values.unsqueeze(-1) if of_groups is None else values.unsqueeze(-1) * of_groups


def unpack(name: str, rows: Tensor) -> Blocks:
    """Take apart rows of blocks [N, bytes] uint8 of the format `name`, which UNPACK must have."""
    return UNPACK[name](rows)


def fields(rows: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Split rows [N, bytes] into the fields of their blocks, each [N, B, size]."""
    return torch.split(torch.unflatten(rows, 1, (rows.shape[1] // sum(sizes), sum(sizes))), list(sizes), -1)


def halves(field: Tensor) -> Tensor:
    """Return a float16 [N, B, 2] uint8 in float32: [N, B]."""
    return field.contiguous().view(torch.float16).squeeze(-1).float()


def _floats(field: Tensor) -> Tensor:
    """Return the float32 numbers that bytes [N, B, 4 n] hold: [N, B, n]."""
    # Not contiguous(), which keeps the strides of a single block.
    return field.clone(memory_format=torch.contiguous_format).view(torch.float32)


def parts(data: Tensor, bits: int, width: int) -> Tensor:
    """Return the parts of `bits` bits of bytes [N, B, n]: of each `width` bytes the lowest part of all comes first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((torch.unflatten(data, -1, (-1, 1, width)) >> shifts.view(-1, 1)) & (1 << bits) - 1).flatten(-3)


def _signed(data: Tensor, offset: int = 0) -> Tensor:
    """Return numbers 0 .. 127 [...] uint8 minus an offset, in int8."""
    return data.view(torch.int8) - offset


def _fifth_bits(qh: Tensor) -> Tensor:
    """Return the bits of four bytes [N, B, 4] in the order of their significance, as 0 or 16: [N, B, 32]."""
    return parts(qh, 1, 1) << 4


def unpack_q4_0(rows: Tensor) -> Blocks:
    scales, qs = fields(rows, 2, 16)
    return Blocks(_signed(parts(qs, 4, 16), 8), halves(scales))


def unpack_q4_1(rows: Tensor) -> Blocks:
    scales, minima, qs = fields(rows, 2, 2, 16)
    return Blocks(_signed(parts(qs, 4, 16)), halves(scales), minima=-halves(minima))


def unpack_q5_0(rows: Tensor) -> Blocks:
    scales, qh, qs = fields(rows, 2, 4, 16)
    return Blocks(_signed(parts(qs, 4, 16) | _fifth_bits(qh), 16), halves(scales))


def unpack_q5_1(rows: Tensor) -> Blocks:
    scales, minima, qh, qs = fields(rows, 2, 2, 4, 16)
    return Blocks(_signed(parts(qs, 4, 16) | _fifth_bits(qh)), halves(scales), minima=-halves(minima))


def unpack_q8_0(rows: Tensor) -> Blocks:
    scales, qs = fields(rows, 2, 32)
    return Blocks(qs.contiguous().view(torch.int8), halves(scales))


def unpack_mxfp4(rows: Tensor) -> Blocks:
    exponents, qs = fields(rows, 1, 16)
    return Blocks(_decoded("MXFP4", qs), _halves_of_powers(exponents))


def unpack_iq4_nl(rows: Tensor) -> Blocks:
    scales, qs = fields(rows, 2, 16)
    return Blocks(_decoded("IQ4_NL", qs), halves(scales))


def _decoded(name: str, qs: Tensor) -> Tensor:
    """Return the levels of 32 codes in each 16 bytes [N, B, 16]: [N, B, 32] int8."""
    values = torch.tensor(CODEBOOKS[name], dtype=torch.int8, device=qs.device)
    codes = parts(qs, 4, 16)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def _halves_of_powers(exponents: Tensor) -> Tensor:
    """Return half of each power of two in E8M0 [N, B, 1] uint8, subnormal for the two least: [N, B] float32."""
    numbers = exponents.squeeze(-1).int()
    return torch.where(numbers < 2, 1 << 21 + numbers.clamp(max=1), numbers - 1 << 23).view(torch.float32)


def unpack_q2_k(rows: Tensor) -> Blocks:
    groups, qs, scales, minima = fields(rows, 16, 64, 2, 2)
    return Blocks(_signed(parts(qs, 2, 32)), halves(scales), _signed(groups & 15), halves(minima), _signed(groups >> 4))


def unpack_q3_k(rows: Tensor) -> Blocks:
    hmask, qs, groups, scales = fields(rows, 32, 64, 12, 2)
    low, high = torch.split(groups, [8, 4], -1)
    group_scales = parts(low, 4, 8) | parts(high, 2, 4) << 4
    levels = parts(qs, 2, 32) | parts(hmask, 1, 32) << 2
    return Blocks(_signed(levels, 4), halves(scales), _signed(group_scales, 32))


def unpack_q4_k(rows: Tensor) -> Blocks:
    scales, minima, groups, qs = fields(rows, 2, 2, 12, 128)
    group_scales, group_minima = _six_bits(groups)
    return Blocks(_signed(parts(qs, 4, 32)), halves(scales), group_scales, halves(minima), group_minima)


def unpack_q5_k(rows: Tensor) -> Blocks:
    scales, minima, groups, qh, qs = fields(rows, 2, 2, 12, 32, 128)
    group_scales, group_minima = _six_bits(groups)
    levels = _signed(parts(qs, 4, 32) | parts(qh, 1, 32) << 4)
    return Blocks(levels, halves(scales), group_scales, halves(minima), group_minima)


def unpack_q6_k(rows: Tensor) -> Blocks:
    ql, qh, groups, scales = fields(rows, 128, 64, 16, 2)
    levels = parts(ql, 4, 64) | parts(qh, 2, 32) << 4
    return Blocks(_signed(levels, 32), halves(scales), groups.contiguous().view(torch.int8))


def unpack_int8_g32(rows: Tensor) -> Blocks:
    scales, levels = fields(rows, 4, 32)
    return Blocks(levels.contiguous().view(torch.int8), _floats(scales).squeeze(-1))


def _unpack_codes(name: str, group: int, rows: Tensor) -> Blocks:
    """Blocks of 32 numbers; where these have two scales, the halves become blocks of their own."""
    scales, qs = fields(rows, 128 // group, 16)
    levels = torch.unflatten(_decoded(name, qs), -1, (32 // group, group)).flatten(1, 2)
    return Blocks(levels, _floats(scales).flatten(1))


def _unpack_int4(group: int, rows: Tensor) -> Blocks:
    """Blocks of 32 numbers: those of a group have equal scales."""
    scales, zeros, qs = fields(rows, 4, 1, group // 2)
    levels = torch.unflatten(parts(qs, 4, 16).short() - zeros.short(), -1, (-1, 32)).flatten(1, 2)
    return Blocks(levels, _floats(scales).squeeze(-1).repeat_interleave(group // 32, dim=1))


def _unpack_fp8(group: int, rows: Tensor) -> Blocks:
    scales, numbers = fields(rows, 4, group)
    return Blocks(numbers.contiguous().view(torch.float8_e4m3fn).float(), _floats(scales).squeeze(-1))


def _six_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and eight minima of six bits that 12 bytes [N, B, 12] hold, each [N, B, 8] int8.

    The first four of each fill six bits of bytes 0 to 7. The others have their lower four bits in bytes 8 to 11, and
    the upper two in the remaining bits of bytes 0 to 7.
    """
    first, second, lower = torch.split(groups, 4, -1)
    scales = torch.cat([first & 63, lower & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, lower >> 4 | second >> 6 << 4], dim=-1)
    return _signed(scales), _signed(minima)


UNPACK: Final[Mapping[str, Callable[[Tensor], Blocks]]] = {
    "Q4_0": unpack_q4_0,
    "Q4_1": unpack_q4_1,
    "Q5_0": unpack_q5_0,
    "Q5_1": unpack_q5_1,
    "Q8_0": unpack_q8_0,
    "MXFP4": unpack_mxfp4,
    "IQ4_NL": unpack_iq4_nl,
    "Q2_K": unpack_q2_k,
    "Q3_K": unpack_q3_k,
    "Q4_K": unpack_q4_k,
    "Q5_K": unpack_q5_k,
    "Q6_K": unpack_q6_k,
    "int8_g32": unpack_int8_g32,
    **{f"int4_g{group}": partial(_unpack_int4, group) for group in (32, 64, 128)},
    **{f"fp8_g{group}": partial(_unpack_fp8, group) for group in (32, 128)},
    **{name: partial(_unpack_codes, name, int(name[-2:])) for name in CODEBOOKS if name.endswith(("_g32", "_g16"))},
}
