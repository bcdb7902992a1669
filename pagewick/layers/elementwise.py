"""What is done to every number by itself; see the functions of the same names in pagewick.kernels."""

from __future__ import annotations

from torch import Tensor

from pagewick import kernels


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b of one shape, rounded once."""
    return kernels.add(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor, rounded once."""
    return kernels.scale(x, factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), rounded once: never beyond cap (Gemma 2, arXiv:2408.00118)."""
    return kernels.soft_cap(x, cap)
