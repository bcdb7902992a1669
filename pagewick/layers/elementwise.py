"""Operations on each number by itself, for models: sums, multiples, caps (Gemma 2's, arXiv:2408.00118), activations."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick import kernels
from pagewick.kernels import add, scale, sigmoid_gate, soft_cap

__all__ = ["Activation", "add", "scale", "sigmoid_gate", "soft_cap"]


class Activation(nn.Module):
    """kind(x), a name in kernels.reference.ACTIVATIONS, of each number; with is_gated, x [..., 2 * size]
    -> kind(first half) * second half (arXiv:2002.05202).
    """

    def __init__(self, kind: str, *, is_gated: bool) -> None:
        super().__init__()
        self._kind = kind
        self._function = kernels.gated_activation if is_gated else kernels.activation

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self._kind)
