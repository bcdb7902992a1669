"""Linear weights in a floating-point dtype, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewick.errors import ModelLoadError
from pagewick.quantization.method import PLAIN, Packing

_FLOAT_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


class UnquantizedMethod:
    """One parameter `weight` [out_features, in_features]; a LinearMethod."""

    def create(
        self,
        layer: nn.Module,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Mapping[str, Packing]:
        """Register `weight` in `dtype`, uninitialised."""
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        return {"weight": PLAIN}

    def load(self, layer: nn.Module, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy `tensor` [rows, in_features] into the rows from `out_offset` on, in the parameter's dtype.

        Raises ModelLoadError if it does not fit, or holds integers or 8-bit floats, which mean nothing
        without their scales.
        """
        weight = layer.get_parameter(name)
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"{name} is stored as {tensor.dtype}, a quantized weight, but config.json has no "
                "quantization_config; use the unquantized checkpoint"
            )
        num_rows, in_features = weight.shape
        if tensor.ndim != 2 or tensor.shape[1] != in_features or out_offset + tensor.shape[0] > num_rows:
            raise ModelLoadError(
                f"{name} has shape {list(tensor.shape)}, which does not fit into rows {out_offset}.. of "
                f"{list(weight.shape)}"
            )
        with torch.no_grad():
            weight[out_offset : out_offset + tensor.shape[0]].copy_(tensor)

    def finish(self, layer: nn.Module) -> None:
        """Nothing: the checkpoint's layout is the one that `apply` uses."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""
        return functional.linear(x, layer.get_parameter("weight"), bias)
