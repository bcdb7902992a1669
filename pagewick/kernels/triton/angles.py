"""Cosines and sines by which queries and keys are rotated, once for a step.

Definitions: rotary_angles and dynamic_rotary_angles of reference_rope.py. A token's angles depend on its position
alone, bit for bit; they are the GPU's own cosines, within about 2 units in the last place of 1.

Dimensions: T tokens, R the rotated part of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.reference_rope import check_dynamic_scaling
from pagewick.kernels.triton.variant import Variant

# The largest R / 2.
BLOCK = 128


@triton.jit(do_not_specialize=["scale"])
def angles_of_positions(positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, num_frequencies, scale, BLOCK: tl.constexpr):
    """Write cos and sin [T, R / 2] float32 of positions [T] int64 times frequencies [R / 2] float32, times scale."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_frequencies
    position = tl.load(positions_ptr + token).to(tl.float32)
    angles = position * tl.load(frequencies_ptr + columns, mask=inside, other=0.0)
    tl.store(cos_ptr + token * num_frequencies + columns, tl.cos(angles) * scale, mask=inside)
    tl.store(sin_ptr + token * num_frequencies + columns, tl.sin(angles) * scale, mask=inside)


@triton.jit
def _power(base, exponent):
    """Return base ** exponent in float64, for a base above 0."""
    return tl.exp2(exponent * tl.log2(base.to(tl.float64)))


@triton.jit
def dynamic_angles(
    positions_ptr, cos_ptr, sin_ptr, num_frequencies, original_max_position, theta, factor, factor_less_one, power,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write cos and sin [T, R / 2] float32 for positions [T] int64, with frequencies that fall as a sequence grows.

    power: R / (R - 2).
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_frequencies
    position = tl.load(positions_ptr + token)
    length = (position + 1).to(tl.float32)
    share = tl.math.div_rn(length * factor, original_max_position.to(tl.float32))
    growth = share - factor_less_one
    is_short = position < original_max_position
    # The power of a short sequence is not used; it may be that of a number below 0.
    grown = theta * _power(tl.where(is_short, 1.0, growth), power).to(tl.float32)
    base = tl.zeros((BLOCK,), tl.float32) + tl.where(is_short, theta, grown)
    rotary_dim = tl.zeros((BLOCK,), tl.float32) + 2.0 * num_frequencies
    powers = _power(base, tl.math.div_rn(2.0 * columns.to(tl.float32), rotary_dim)).to(tl.float32)
    angles = position.to(tl.float32) * tl.math.div_rn(tl.full((BLOCK,), 1.0, tl.float32), powers)
    tl.store(cos_ptr + token * num_frequencies + columns, tl.cos(angles), mask=inside)
    tl.store(sin_ptr + token * num_frequencies + columns, tl.sin(angles), mask=inside)


_TABLES = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "num_frequencies": "i32"}
_ANGLES = Variant(
    "rotary_angles", angles_of_positions,
    {"positions_ptr": "*i64", "frequencies_ptr": "*fp32", **_TABLES, "scale": "fp32"}, {"BLOCK": BLOCK}, num_warps=1,
)  # fmt: skip
_DYNAMIC = Variant(
    "dynamic_rotary_angles", dynamic_angles,
    {"positions_ptr": "*i64", **_TABLES, "original_max_position": "i32",
     **dict.fromkeys(("theta", "factor", "factor_less_one", "power"), "fp32")},
    {"BLOCK": BLOCK}, num_warps=1, in_sample=True,
)  # fmt: skip
VARIANTS = (_ANGLES, _DYNAMIC)
WORKLOADS = ()


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """reference.rotary_angles for positions [T] int64."""
    fits = frequencies.dim() == 1 and len(frequencies) <= BLOCK and frequencies.dtype == torch.float32
    if not (fits and positions.dim() == 1 and positions.device == frequencies.device):
        return reference.rotary_angles(positions, frequencies, scale)
    return _run(_ANGLES, positions, len(frequencies), frequencies_ptr=frequencies.contiguous(), scale=scale)


def dynamic_rotary_angles(
    positions: Tensor, theta: float, rotary_dim: int, factor: float, original_max_position: int
) -> tuple[Tensor, Tensor]:
    """reference.dynamic_rotary_angles for positions [T] int64."""
    check_dynamic_scaling(rotary_dim, factor, original_max_position)
    if positions.dim() != 1 or rotary_dim > 2 * BLOCK or original_max_position >= 2**31:
        return reference.dynamic_rotary_angles(positions, theta, rotary_dim, factor, original_max_position)
    return _run(
        _DYNAMIC, positions, rotary_dim // 2, original_max_position=original_max_position, theta=theta, factor=factor,
        factor_less_one=factor - 1, power=rotary_dim / (rotary_dim - 2),
    )  # fmt: skip


def _run(variant: Variant, positions: Tensor, num_frequencies: int, **arguments: object) -> tuple[Tensor, Tensor]:
    cos, sin = torch.empty((2, len(positions), num_frequencies), dtype=torch.float32, device=positions.device)
    if len(positions):
        variant.launch(
            (len(positions),), positions_ptr=positions.contiguous(), cos_ptr=cos, sin_ptr=sin,
            num_frequencies=num_frequencies, **arguments,
        )  # fmt: skip
    return cos, sin
