"""Writers of quantized weights, from the formats' definitions and with no code of the package.

Each takes float32 numbers [N, C] and returns the tensors of a checkpoint, by the ends of their names, and the numbers
that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def _per_number(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The scale of every number, one loop after the other."""
    found = torch.empty(shape)
    for row in range(shape[0]):
        for first in range(0, shape[1], block[1]):
            found[row, first : first + block[1]] = scales[row // block[0], first // block[1]]
    return found


def _largest(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in every block; blocks at the edges are smaller."""
    bands = [weight[first : first + block[0]] for first in range(0, len(weight), block[0])]
    return torch.stack(
        [
            torch.stack(
                [band[:, first : first + block[1]].abs().max() for first in range(0, weight.shape[1], block[1])]
            )
            for band in bands
        ]
    )


def fp8(
    weight: Tensor,
    block: tuple[int, int] | None = (128, 128),
    *,
    name: str = ".weight_scale_inv",
    shape: tuple[int, ...] | None = None,
    scale_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Written:
    """block: None is the whole weight. shape: of the stored scales."""
    block = block or (weight.shape[0], weight.shape[1])
    scales = _largest(weight, block) / (_E4M3_MAX if dtype == torch.float8_e4m3fn else 57344.0)
    if scale_dtype in (torch.float8_e8m0fnu, torch.uint8):
        exponents = scales.log2().ceil()
        scales, kept = 2.0**exponents, (exponents + 127).to(torch.uint8)
        kept = kept.view(scale_dtype)
    else:
        kept = scales.to(scale_dtype)
        scales = kept.float()
    each = _per_number(scales, weight.shape, block)
    values = (weight / each).clamp(-_E4M3_MAX, _E4M3_MAX).to(dtype)
    return {".weight": values, name: kept.reshape(shape or kept.shape)}, values.float() * each


def fp8_rows(weight: Tensor, **options: Any) -> Written:
    """A scale for each row."""
    return fp8(weight, (1, weight.shape[1]), name=".weight_scale", **options)


def fp8_whole(weight: Tensor, **options: Any) -> Written:
    """One scale, without dimensions unless options say otherwise."""
    return fp8(weight, None, **{"name": ".weight_scale", "shape": (), **options})


def packed_int(words_of: Tensor, bits: int) -> Tensor:
    """Whole numbers 0 .. 2 ** bits - 1 [n, C], whose bits follow each other from the lowest on, in int32."""
    rows = []
    for row in words_of.tolist():
        stream = sum(value << (bits * index) for index, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(stream >> 32 * word) & 0xFFFFFFFF for word in range(count)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def loose_int(words_of: Tensor, bits: int) -> Tensor:
    """Pack whole numbers [n, C] into words of int32 from the lowest bit on. No number crosses into the next word."""
    per_word = 32 // bits
    rows = [
        [
            sum(value << (bits * index) for index, value in enumerate(row[first : first + per_word]))
            for first in range(0, len(row), per_word)
        ]
        for row in words_of.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def integers(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    pack: Callable[[Tensor, int], Tensor] = packed_int,
    is_symmetric: bool = True,
    is_packed: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
    order: Tensor | None = None,
    scale_shape: tuple[int, ...] | None = None,
) -> Written:
    """compressed-tensors. group_size: -1 for all columns. order: the columns, sorted by group."""
    num_columns = weight.shape[1]
    size = num_columns if group_size == -1 else group_size
    groups = torch.arange(num_columns) // size
    if order is not None:
        groups = torch.empty_like(groups).scatter_(0, order, groups)
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        of_group = weight[:, groups == group]
        if scale_shape is not None:
            of_group = weight.flatten().expand(len(weight), -1)
        if is_symmetric:
            scale = (of_group.abs().amax(1) / high).to(scale_dtype).float()
            zero = torch.zeros_like(scale)
        else:
            smallest, largest = of_group.amin(1).clamp(max=0), of_group.amax(1).clamp(min=0)
            scale = ((largest - smallest) / (high - low)).to(scale_dtype).float()
            zero = (low - smallest / scale).round().clamp(low, high)
        scales.append(scale)
        zeros.append(zero)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    levels = (weight / scale[:, groups] + zero[:, groups]).round().clamp(low, high)
    kept_scale = scale.to(scale_dtype)
    found = {".weight_scale": kept_scale if scale_shape is None else kept_scale[0].reshape(scale_shape)}
    if is_packed:
        found[".weight_packed"] = pack(levels.int() - low, bits)
        found[".weight_shape"] = torch.tensor(weight.shape)
    else:
        found[".weight"] = levels.to(torch.int8)
    if not is_symmetric:
        found[".weight_zero_point"] = (
            pack((zero.int() - low).t(), bits).t().contiguous() if is_packed else zero.to(torch.int8)
        )
    if order is not None:
        found[".weight_g_idx"] = groups.int()
    return found, (levels - zero[:, groups]) * scale[:, groups]


def _e2m1(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bit patterns [n, C] and their numbers."""
    nearest = (numbers.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    return nearest + 8 * (numbers < 0), _E2M1[nearest] * torch.where(numbers < 0, -1.0, 1.0)


def _octets(patterns: Tensor) -> Tensor:
    return (patterns[:, 0::2] + 16 * patterns[:, 1::2]).to(torch.uint8)


def nvfp4(weight: Tensor, *, is_modelopt: bool = False) -> Written:
    whole = weight.abs().max() / (_E2M1_MAX * _E4M3_MAX)
    # ModelOpt stores the factor, and compressed-tensors stores its reciprocal.
    kept_whole = whole if is_modelopt else 1 / whole
    scales = (_largest(weight, (1, 16)) / _E2M1_MAX / whole).to(torch.float8_e4m3fn)
    of_groups = scales.float() * kept_whole if is_modelopt else scales.float() / kept_whole
    each = _per_number(of_groups, weight.shape, (1, 16))
    patterns, numbers = _e2m1(weight / each)
    names = (".weight", ".weight_scale_2") if is_modelopt else (".weight_packed", ".weight_global_scale")
    shape = () if is_modelopt else (1,)
    tensors = {names[0]: _octets(patterns), ".weight_scale": scales, names[1]: kept_whole.reshape(shape)}
    return tensors, numbers * each


def mxfp4(weight: Tensor) -> Written:
    exponents = _largest(weight, (1, 32)).clamp(min=1e-9).log2().floor() - 2
    each = _per_number(2.0**exponents, weight.shape, (1, 32))
    patterns, numbers = _e2m1((weight / each).clamp(-_E2M1_MAX, _E2M1_MAX))
    return {".weight_packed": _octets(patterns), ".weight_scale": (exponents + 127).to(torch.uint8)}, numbers * each


def int8_bitsandbytes(weight: Tensor) -> Written:
    largest = weight.abs().amax(1)
    levels = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {".weight": levels, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, levels.float() * (largest[:, None] / 127)


def four_bit(weight: Tensor, kind: str = "nf4", block_size: int = 64, *, is_nested: bool = False) -> Written:
    """bitsandbytes: blocks run through the numbers without regard to rows."""
    table = NF4 if kind == "nf4" else FP4
    flat = weight.flatten()
    blocks = [(first, min(first + block_size, len(flat))) for first in range(0, len(flat), block_size)]
    absmax = torch.stack([flat[first:end].abs().max() for first, end in blocks])
    state = {"quant_type": kind, "blocksize": block_size, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {".weight.quant_map": table.clone()}
    if is_nested:
        offset = absmax.mean().item()
        nested_map = torch.linspace(-1, 1, 256)
        groups = torch.arange(len(absmax)) // 256
        nested_absmax = torch.zeros(-(-len(absmax) // 256))
        nested_absmax.scatter_reduce_(0, groups, (absmax - offset).abs(), "amax")
        factors = nested_absmax.clamp_(min=1e-6)[groups]
        indices = ((absmax - offset) / factors).unsqueeze(1).sub(nested_map).abs().argmin(1)
        tensors |= {".weight.absmax": indices.to(torch.uint8), ".weight.nested_quant_map": nested_map}
        tensors[".weight.nested_absmax"] = nested_absmax
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        absmax = nested_map[indices] * factors + offset
    else:
        tensors[".weight.absmax"] = absmax
    each = torch.cat([absmax[block].expand(end - first) for block, (first, end) in enumerate(blocks)])
    indices = (flat / each).unsqueeze(1).sub(table).abs().argmin(1)
    tensors[".weight"] = (16 * indices[0::2] + indices[1::2]).to(torch.uint8).unsqueeze(1)
    text = json.dumps(state).encode()
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (table[indices] * each).view(weight.shape)


def hqq(weight: Tensor, bits: int = 4, group_size: int = 64, axis: int = 1) -> Written:
    """The highest bits of a byte belong to the first part of the rows of groups."""
    matrix = weight.reshape(-1, group_size) if axis == 1 else weight.reshape(group_size, -1)
    smallest, largest = matrix.amin(axis, keepdim=True), matrix.amax(axis, keepdim=True)
    scale = ((largest - smallest) / ((1 << bits) - 1)).half()
    zero = (-smallest / scale.float()).half()
    levels = (matrix / scale.float() + zero.float()).round().clamp(0, (1 << bits) - 1).int()
    numbers = ((levels.float() - zero.float()) * scale.float()).view(weight.shape)
    per_word = 10 if bits == 3 else 8 // bits
    height = -(-len(levels) // per_word)
    padded = torch.cat([levels, levels.new_zeros(height * per_word - len(levels), levels.shape[1])])
    bounds = range(0, height * per_word + 1, height)
    packed = torch.zeros(height, levels.shape[1], dtype=torch.int32)
    for first, end in pairwise(bounds):
        packed = (packed << bits) | padded[first:end]
    tensors = {
        ".W_q": packed if bits == 3 else packed.to(torch.uint8),
        ".scale": scale, ".zero": zero, ".shape": torch.tensor(weight.shape),
        ".nbits": torch.tensor(bits, dtype=torch.int32), ".group_size": torch.tensor(group_size, dtype=torch.int32),
        ".axis": torch.tensor(axis, dtype=torch.int32),
        ".packing": torch.tensor([ord(letter) for letter in f"{bits}bit_u8"], dtype=torch.uint8),
    }  # fmt: skip
    return tensors, numbers
