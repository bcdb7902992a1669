"""Activation functions, with the names of kernels.reference.ACTIVATIONS."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick import kernels


class Activation(nn.Module):
    """kind(x) of each number; with is_gated, x [..., 2 * size] -> kind(first half) * second half (arXiv:2002.05202)."""

    def __init__(self, kind: str, *, is_gated: bool) -> None:
        super().__init__()
        self._kind = kind
        self._function = kernels.gated_activation if is_gated else kernels.activation

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self._kind)
