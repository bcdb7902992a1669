"""Norms of hidden states in plain PyTorch; a part of reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels.reference_elementwise import compute_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension of x [..., H] by its root mean square, then scale by weight + weight_offset [H].

    out: a tensor like x to write the result to, which may be x itself; its rows may lie apart.
    The mean and the division are computed in float32. Without an offset the result is rounded to x.dtype before the
    weight is applied, as in the Llama code of transformers; with one it is rounded once, at the end, as in its Gemma
    code.
    """
    wide = x.to(compute_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight_offset:
        result = (normed * (weight.to(wide.dtype) + weight_offset)).to(x.dtype)
    else:
        result = (normed.to(x.dtype) * weight).to(x.dtype)
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), both [..., H] in x.dtype.

    A residual in float32 stays so, and the sum with it, which is rounded to x.dtype before it is normalised.
    """
    new_residual = x + residual
    return rms_norm(new_residual.to(x.dtype), weight, eps, weight_offset), new_residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Bring the last dimension of x [..., H] to mean 0 and variance 1, times weight [H], plus bias [H].

    Everything is computed in float32 and rounded once. Ba et al. 2016, arXiv:1607.06450.
    """
    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual), both [..., H] in x.dtype."""
    new_residual = x + residual
    return layer_norm(new_residual, weight, bias, eps), new_residual
