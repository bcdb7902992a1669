"""The tensors of a layer while it is quantized, and the division of inputs by factors in the module before (AWQ)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from pagewick.calibration.stages import NormAbsorber, RowsAbsorber
from pagewick.quantization.calibrated.results import LayerResult, QuantizedLinear

_SMALLEST_SCALE: Final = 2.0**-24


@dataclass(slots=True)
class LayerTensors:
    """A layer's tensors by their paths in the layer: as the checkpoint has them, or as they have become.

    stored: returns a tensor of the checkpoint. name: returns the checkpoint's name of a path.
    """

    stored: Callable[[str], Tensor]
    name: Callable[[str], str]
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    unquantized: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_result(cls, stored: Callable[[str], Tensor], result: LayerResult) -> LayerTensors:
        """Return the tensors of a finished layer."""
        linears = {linear.name: linear for linear in result.linears}
        return cls(stored, str, linears, dict(result.tensors))

    def result(self) -> LayerResult:
        return LayerResult(tuple(self.linears.values()), self.changed, self.unquantized, self.remarks)

    def get(self, name: str) -> Tensor:
        """Return a tensor by its name in the checkpoint, as the quantized model has it."""
        if linear := self.linears.get(name.removesuffix(".weight")):
            return linear.dequantize()
        return self.changed[name] if name in self.changed else self.stored(name)

    def weight(self, path: str) -> Tensor:
        """Return the weight of a linear layer in float32."""
        return self.get(f"{self.name(path)}.weight").float()

    def change(self, path: str, tensor: Tensor) -> Tensor:
        """Replace a tensor of the checkpoint, and keep its dtype; return the rounded tensor in float32."""
        name = self.name(path)
        self.changed[name] = tensor.to(self.stored(name).dtype)
        return self.changed[name].float()


def absorb(absorber: NormAbsorber | RowsAbsorber, factors: Tensor, tensors: LayerTensors) -> Tensor:
    """Divide the outputs of an absorber by factors, one for each column of its readers, float32 [n].

    Returns the factors by which the readers' columns must be multiplied: they differ from those given by the rounding
    of the absorber's own tensors. A norm's further readers are multiplied here.
    """
    if isinstance(absorber, NormAbsorber):
        return _absorb_in_norm(absorber, factors, tensors)
    rows, name = torch.tensor(absorber.rows), tensors.name(absorber.name)
    if linear := tensors.linears.get(name):
        scales = linear.scales.clone()
        divided = linear.scales[rows].float() / factors.unsqueeze(1)
        scales[rows] = divided.clamp_(min=_SMALLEST_SCALE).to(scales.dtype)
        tensors.linears[name] = replace(linear, scales=scales)
    else:
        weight = tensors.weight(absorber.name).clone()
        weight[rows] /= factors.unsqueeze(1)
        tensors.change(f"{absorber.name}.weight", weight)
    if absorber.has_bias:
        bias = tensors.get(tensors.name(f"{absorber.name}.bias")).float().clone()
        bias[rows] /= factors
        tensors.change(f"{absorber.name}.bias", bias)
    return factors


def _absorb_in_norm(absorber: NormAbsorber, factors: Tensor, tensors: LayerTensors) -> Tensor:
    path, offset = f"{absorber.name}.weight", absorber.offset
    before = tensors.get(tensors.name(path)).float() + offset
    after = tensors.change(path, before / factors - offset) + offset
    is_lost = (after == 0) | (before == 0)
    after = tensors.change(path, torch.where(is_lost, before, after) - offset) + offset
    factors = torch.where(is_lost, 1.0, before / after)
    if absorber.has_bias:
        bias = f"{absorber.name}.bias"
        tensors.change(bias, tensors.get(tensors.name(bias)).float() / factors)
    for reader in absorber.readers:
        tensors.change(f"{reader}.weight", tensors.weight(reader) * factors)
    return factors
