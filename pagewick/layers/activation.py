"""Gated activations."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick import kernels


class SiluAndMul(nn.Module):
    """x [..., 2 * size] -> silu(first half) * second half (SwiGLU, arXiv:2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.silu_and_mul(x)
