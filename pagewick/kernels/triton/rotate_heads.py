"""Rotation of heads, for encoders of images: reference.rotate_heads.

Rotary embeddings: Su et al. 2021, arXiv:2104.09864. rope.py rotates heads, too, but stores keys and values on the way.
Each number is read once and written once. A result depends on its own pair alone, and has the bits of the definition.

Dimensions: T rows, H heads, D head size, R the rotated part of a head.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import Rotation
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# Pairs of a program: it takes BLOCK_PAIRS of a head at once, or one of SMALLER, and as many heads as then fit.
BLOCK_PAIRS = 64
_SMALLER = (16, 32)
_TILE = 1024
# Numbers that are loaded at once: all distances in memory must be multiples of one of these.
_UNITS = (8, 4, 1)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["num_heads", "row_units", "head_units", "half_units", "size_units"])
def turn_rows(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_heads, row_units, head_units, half_units, size_units,
    UNIT: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_H heads of row program_id(0) of x [T, H, D] to out [T, H, D], whose rows follow each other.

    cos, sin: [T, R / 2] float32. All sizes are in units, so that the compiler knows that they are multiples of UNIT:
    the distances between rows and between heads of x, R / 2, and D.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (heads < num_heads)[:, None]
    half, size = half_units * UNIT, size_units * UNIT
    x_rows = x_ptr + row * (row_units * UNIT) + heads[:, None].to(tl.int64) * (head_units * UNIT)
    out_rows = out_ptr + (row * num_heads + heads[:, None]) * size
    for start in range(0, half, BLOCK_P):
        pairs = start + tl.arange(0, BLOCK_P)
        cos = tl.load(cos_ptr + row * half + pairs, mask=pairs < half, other=1.0)[None, :]
        sin = tl.load(sin_ptr + row * half + pairs, mask=pairs < half, other=0.0)[None, :]
        firsts = 2 * pairs if IS_INTERLEAVED else pairs
        seconds = firsts + 1 if IS_INTERLEAVED else firsts + half
        inside = is_head & (pairs < half)[None, :]
        first = tl.load(x_rows + firsts[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_rows + seconds[None, :], mask=inside, other=0.0).to(tl.float32)
        dtype = out_ptr.dtype.element_ty
        tl.store(out_rows + firsts[None, :], (first * cos - second * sin).to(dtype), mask=inside)
        tl.store(out_rows + seconds[None, :], (second * cos + first * sin).to(dtype), mask=inside)
    for start in range(2 * half, size, BLOCK_P):
        others = start + tl.arange(0, BLOCK_P)
        inside = is_head & (others < size)[None, :]
        tl.store(out_rows + others[None, :], tl.load(x_rows + others[None, :], mask=inside, other=0.0), mask=inside)


def _variant(dtype: torch.dtype, block: int, unit: int, is_interleaved: bool) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    pointers = {"x_ptr": number, "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": number}
    numbers = ("num_heads", "row_units", "head_units", "half_units", "size_units")
    return Variant(
        name=f"turn_{TYPE_NAMES[dtype]}_{block}_by_{unit}{'_interleaved' if is_interleaved else ''}",
        kernel=turn_rows,
        signature={**pointers, **dict.fromkeys(numbers, "i32")},
        constexprs={
            "UNIT": unit, "IS_INTERLEAVED": is_interleaved, "BLOCK_H": _TILE // block, "BLOCK_P": block,
        },
        in_sample=(dtype, block, unit, is_interleaved) == (torch.bfloat16, 64, 4, False),
        # Products are rounded before they are added, as PyTorch does it.
        fuses=False,
    )  # fmt: skip


_VARIANTS = {key: _variant(*key) for key in itertools.product(_DTYPES, (*_SMALLER, BLOCK_PAIRS), _UNITS, (False, True))}
VARIANTS = tuple(_VARIANTS.values())

# The queries or the keys of a picture of 1,024 x 1,024 pixels for Qwen3-VL, and their angles.
WORKLOADS = (
    Workload("rotate_heads", "4096 rows, 16 heads of 72, bf16", 4096 * (2 * 16 * 72 * 2 + 72 * 4),
             3 * 4096 * 16 * 72, on_tensor_cores=False),
)  # fmt: skip


def rotate_heads(x: Tensor, rotation: Rotation) -> Tensor:
    """reference.rotate_heads for heads in one piece."""
    cos, sin, is_interleaved = rotation
    if not (x.dtype in _DTYPES and x.stride(2) == 1 and cos.dtype == sin.dtype == torch.float32):
        return by_definition(reference.rotate_heads, x, rotation)
    num_rows, num_heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[1]
    unit = next(unit for unit in _UNITS if math.gcd(x.stride(0), x.stride(1), half, head_dim) % unit == 0)
    block = next((block for block in _SMALLER if block >= half), BLOCK_PAIRS)
    variant = _VARIANTS[x.dtype, block, unit, is_interleaved]
    variant.launch(
        (num_rows, -(-num_heads // variant.constexprs["BLOCK_H"])), x_ptr=x, cos_ptr=cos, sin_ptr=sin, out_ptr=out,
        num_heads=num_heads, row_units=x.stride(0) // unit, head_units=x.stride(1) // unit, half_units=half // unit,
        size_units=head_dim // unit,
    )  # fmt: skip
    return out
