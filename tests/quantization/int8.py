"""A toy format for tests: rows of int8, each with a scale, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewick.errors import ModelLoadError
from pagewick.quantization.method import LinearMethod, Storage
from pagewick.quantization.packing import PLAIN, ROW_VECTOR, Packing


@dataclass(frozen=True)
class Int8Method(LinearMethod):
    """A weight [O, I] int8 and a weight_scale [O]; implements the four abstract methods and nothing else."""

    def create(self, storage: Storage) -> Mapping[str, Packing]:
        spec = storage.spec
        weight = torch.empty(spec.out_features, spec.in_features, dtype=torch.int8, device=spec.device)
        scale = torch.empty(spec.out_features, dtype=torch.float32, device=spec.device)
        for name, empty in (("weight", weight), ("weight_scale", scale)):
            storage.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        return {"weight": PLAIN, "weight_scale": ROW_VECTOR}

    def load(self, storage: Storage, name: str, tensor: Tensor, *, out_offset: int) -> None:
        parameter = storage.get_parameter(name)
        if tensor.dtype != parameter.dtype:
            raise ModelLoadError(f"{name} is {tensor.dtype}, not {parameter.dtype}")
        parameter[out_offset : out_offset + len(tensor)].copy_(tensor)

    def finish(self, storage: Storage) -> None:
        """Change the layout to [I, O], so that a weight that was not finished gives wrong results."""
        columns = storage.get_parameter("weight").t().contiguous()
        storage.register_parameter("weight", nn.Parameter(columns, requires_grad=False))

    def apply(
        self,
        storage: Storage,
        x: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        weight, scale = storage.get_parameter("weight"), storage.get_parameter("weight_scale")
        product = functional.linear(x.float(), weight.t().float()) * scale
        product = (product if bias is None else product + bias.float()).to(out_dtype or x.dtype)
        return product if out is None else out.copy_(product)


INT8 = Int8Method()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the int8 weight [O, I], its scales [O], and their product in float32."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-9) / 127
    rows = (weight.float() / scale[:, None]).round().to(torch.int8)
    return rows, scale, rows.float() * scale[:, None]


def quantized(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a checkpoint whose matrices are all int8, and an unquantized one of the same values."""
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            stored[name], stored[f"{name}_scale"], meant[name] = quantize(tensor)
    return stored, meant
