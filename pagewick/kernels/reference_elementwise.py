"""Activations and other operations on single numbers in plain PyTorch; a part of reference.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# The bound of clamped_swish, the activation of gpt-oss.
_CLAMP = 7.0
# relu2: Primer's squared ReLU (arXiv:2109.08668). quick_gelu: the sigmoid approximation of Hendrycks and Gimpel
# (arXiv:1606.08415), with which CLIP was trained.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
    "clamped_swish": lambda x: x.clamp(max=_CLAMP) * torch.sigmoid(1.702 * x.clamp(max=_CLAMP)),
    "clamped_silu10": lambda x: F.silu(x.clamp(max=10.0)),
    "softplus": F.softplus,
    "silu_within4": lambda x: F.silu(x).clamp(max=4.0),
    "silu_within5": lambda x: F.silu(x).clamp(max=5.0),
    "silu_within7": lambda x: F.silu(x).clamp(max=7.0),
    "silu_within16": lambda x: F.silu(x).clamp(max=16.0),
}
# Activations whose gated form multiplies by a function of `up` and not by `up` itself.
_FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped_swish": lambda up: up.clamp(-_CLAMP, _CLAMP) + 1,
    "clamped_silu10": lambda up: up.clamp(-10.0, 10.0),
    "silu_within4": lambda up: up.clamp(-4.0, 4.0),
    "silu_within5": lambda up: up.clamp(-5.0, 5.0),
    "silu_within7": lambda up: up.clamp(-7.0, 7.0),
    "silu_within16": lambda up: up.clamp(-16.0, 16.0),
}


def activation(x: Tensor, kind: str) -> Tensor:
    """Apply the function `kind` (a name in ACTIVATIONS) to each number of x, in float32, rounded once to x.dtype."""
    return ACTIVATIONS[kind](x.to(compute_dtype(x))).to(x.dtype)


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """Return activation(gate) * up for x [..., 2 * I] = (gate, up): [..., I] in x.dtype, rounded once from float32.

    clamped_swish multiplies by up + 1, where up is at least -7 and at most 7. silu_within4 and the like (Step 3.7,
    Ling 3.0) multiply by an up that is bounded by the number in their name; clamped_silu10 (DeepSeek V4), too, which
    bounds its gate from above by that number.
    """
    gate, up = x.to(compute_dtype(x)).chunk(2, dim=-1)
    return (ACTIVATIONS[kind](gate) * (_FACTORS[kind](up) if kind in _FACTORS else up)).to(x.dtype)


def widen(x: Tensor) -> Tensor:
    """Return x [..., H] in float32, or as it is if its dtype is as wide."""
    return x.to(compute_dtype(x))


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return a + b, of one dtype, rounded once: a [..., H], b of the same shape or with one row for several of a.

    b then has dimensions of size 1 before H, or lacks the first dimensions: [H] serves all rows.
    """
    return a + b


def limit(x: Tensor, bound: float) -> Tensor:
    """Return x [..., H] with bound, as a float32, in place of larger numbers, and -bound in place of smaller ones.

    bound > 0; it is rounded once to x.dtype.
    """
    return torch.clamp(x.to(compute_dtype(x)), -bound, bound).to(x.dtype)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a * b, of one dtype, rounded once; the shapes are those of `add`."""
    return a * b


def scale(x: Tensor, factor: float) -> Tensor:
    """Return x * factor for x [..., H], in float32 (the factor, too), rounded once to x.dtype."""
    return (x.to(compute_dtype(x)) * factor).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), both [..., H] of one dtype, in float32, rounded once to x.dtype."""
    return (x.to(compute_dtype(x)) * torch.sigmoid(gate.to(compute_dtype(x)))).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) for x [..., H], in float32, rounded once to x.dtype (Gemma 2's report). cap > 0."""
    return (cap * torch.tanh(x.to(compute_dtype(x)) / cap)).to(x.dtype)


def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """Return xIELU (arXiv:2411.13010) of x [..., H], in float32, rounded once to x.dtype.

    positive * x^2 + beta * x where x > 0, else (e^min(x, eps) - 1 - x) * negative + beta * x. eps is below 0.
    """
    wide = x.to(compute_dtype(x))
    curved = (torch.expm1(wide.clamp(max=eps)) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, curved) + beta * wide).to(x.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which operations on x compute: float32, or a wider one."""
    return torch.promote_types(x.dtype, torch.float32)
