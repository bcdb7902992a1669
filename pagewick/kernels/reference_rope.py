"""Rotation and normalisation of heads in plain PyTorch; a part of reference.py.

Dimensions as there; R: the rotary dimension, which is the part of a head that is rotated.
"""

import torch
from torch import Tensor

from pagewick.kernels.options import HeadNorm, Rotation


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R / 2] float32 of positions [T] int64 times frequencies [R / 2], both times `scale`.

    shift: is added to positions first, which become 0 where they would fall below.

    The product is computed in float32, as in transformers. PyTorch's cosine and sine are within 1 unit in the last
    place (of 1 for results near 0); the native ones are rounded from double precision.
    """
    if shift:
        positions = (positions + shift).clamp(min=0)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos() * scale, angles.sin() * scale


def dynamic_rotary_angles(
    positions: Tensor, theta: float, rotary_dim: int, factor: float, original_max_position: int
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, R / 2] float32 of positions [T] int64, with frequencies that fall as a sequence grows.

    This is "dynamic NTK" scaling as in transformers; there is no publication. The token at position p ends a sequence
    of L = p + 1. For L > original_max_position its frequencies are those of the base theta * (factor * L /
    original_max_position - (factor - 1)) ** (R / (R - 2)), else those of theta. The frequencies of a token depend on
    its own position alone, as in transformers when it is given one token at a time. Powers are rounded from float64,
    all other steps are in float32. Raises ValueError for an odd R, one below 4 and a factor below 1.
    """
    check_dynamic_scaling(rotary_dim, factor, original_max_position)
    positions = positions.unsqueeze(-1)
    growth = _float32(factor) * (positions + 1).to(torch.float32) / original_max_position - _float32(factor - 1)
    grown = _float32(theta) * growth.double().pow(_float32(rotary_dim / (rotary_dim - 2))).to(torch.float32)
    base = torch.where(positions < original_max_position, _float32(theta), grown)
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device).to(torch.float32) / rotary_dim
    angles = positions.to(torch.float32) * (1 / base.double().pow(exponents.double()).to(torch.float32))
    return angles.cos(), angles.sin()


def check_dynamic_scaling(rotary_dim: int, factor: float, original_max_position: int) -> None:
    """Raise ValueError for numbers for which dynamic_rotary_angles is not defined."""
    if rotary_dim < 4 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and at least 4 for dynamic scaling, not {rotary_dim}")
    if not factor >= 1 or original_max_position < 1:
        raise ValueError(f"dynamic scaling by {factor} beyond {original_max_position}: both must be at least 1")


def _float32(value: float) -> float:
    """Round to float32. A number, unlike a tensor on the CPU, needs no copy to the device of the others."""
    return torch.tensor(value, dtype=torch.float32).item()


def turn_heads(x: Tensor, norm: HeadNorm | None, rotation: Rotation | None, scales: Tensor | None = None) -> Tensor:
    """Normalise heads [T, heads, D], rotate their first R numbers, then multiply each token's heads by scales [T].

    Rotation comes before a norm that says so. Returns a copy, rounded once from float32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm is not None and not norm.is_after_rotation:
        wide = _normed(wide, norm)
    if rotation is not None:
        wide = rotate(wide, rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1), rotation.interleaved)
    if norm is not None and norm.is_after_rotation:
        wide = _normed(wide, norm)
    if scales is not None:
        wide = wide * scales.view(-1, 1, 1)
    return wide.to(x.dtype, copy=True)


def _normed(wide: Tensor, norm: HeadNorm) -> Tensor:
    if norm.is_layer_norm:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    scaled = normed * (norm.weight.to(wide.dtype) + norm.offset)
    return scaled if norm.bias is None else scaled + norm.bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R numbers of the last dimension of x by the angles with these cosines and sines [..., R / 2]."""
    half = cos.shape[-1]
    pairs, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else (pairs[..., :half], pairs[..., half:])
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(
        (torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1), rest), dim=-1
    )
