"""Normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.context import LayerContext
from pagewick.quantization.shapes import check_floats


class Norm(nn.Module):
    """What normalisations share: parameters of the size of a row, which every rank holds whole."""

    def __init__(self, context: LayerContext, size: int, eps: float, names: Iterable[str]) -> None:
        super().__init__()
        self.eps = eps
        for name in names:
            empty = torch.empty(size, dtype=context.dtype, device=context.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, name) for name, _ in self.named_parameters()]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        parameter = self.get_parameter(name)
        check_floats(tensor, tuple(parameter.shape))
        parameter.copy_(tensor)


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension (arXiv:1910.07467)."""

    weight: nn.Parameter

    def __init__(self, context: LayerContext, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__(context, size, eps, ["weight"])
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, self.offset)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, x + residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (arXiv:1607.06450)."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__(context, size, eps, ["weight", "bias"])

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, x + residual)."""
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
