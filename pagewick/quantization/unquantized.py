"""Linear weights in a floating-point dtype, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.kernels.matrix import Matrix
from pagewick.quantization.method import PLAIN, Packing

_FLOAT_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


class UnquantizedMethod:
    """One parameter `weight`, the data of the layer's Matrix [out_features, in_features]; a LinearMethod."""

    def create(
        self,
        layer: nn.Module,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Mapping[str, Packing]:
        """Register `weight` in `dtype`, uninitialised."""
        matrix = Matrix.empty(out_features, in_features, dtype, device)
        layer.register_parameter("weight", nn.Parameter(matrix.data, requires_grad=False))
        layer.__dict__["matrix"] = matrix
        return {"weight": PLAIN}

    def load(self, layer: nn.Module, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy `tensor` [rows, in_features] into the rows from `out_offset` on, in the parameter's dtype.

        Raises ModelLoadError if it does not fit, or holds integers or 8-bit floats, which mean nothing
        without their scales.
        """
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"{name} is stored as {tensor.dtype}, a quantized weight, but config.json has no "
                "quantization_config; use the unquantized checkpoint"
            )
        try:
            _matrix(layer).load(tensor, out_offset)
        except ValueError as error:
            raise ModelLoadError(f"{name}: {error}") from error

    def finish(self, layer: nn.Module) -> None:
        """Nothing: every row went to where `apply` wants it."""

    def apply(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x @ weight.T + bias."""
        return _matrix(layer).linear(x, bias, out_dtype=out_dtype)


def _matrix(layer: nn.Module) -> Matrix:
    matrix: Matrix = layer.__dict__["matrix"]
    return matrix
