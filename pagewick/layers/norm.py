"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.context import LayerContext
from pagewick.layers.shapes import check_shape


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=context.dtype, device=context.device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, x + residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, "weight")]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        weight = self.get_parameter(name)
        check_shape(tensor, tuple(weight.shape))
        weight.copy_(tensor)
