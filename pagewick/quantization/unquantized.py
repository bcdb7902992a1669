"""Weights in a floating-point dtype, without quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.kernels.matrix import Experts, Matrix
from pagewick.kernels.quantized import QuantizedMatrix
from pagewick.quantization.grouped_experts import GroupedExperts
from pagewick.quantization.method import LinearMethod, Storage, StorageSpec
from pagewick.quantization.packing import PLAIN, Packing
from pagewick.quantization.share import Share

_FLOAT_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


@dataclass(frozen=True)
class UnquantizedMethod(LinearMethod):
    """Weights that are stored in one parameter `weight`, the data of a Matrix [out_features, in_features]."""

    def create(self, storage: Storage) -> Mapping[str, Packing]:
        """Register `weight` in the dtype of the activations, uninitialised."""
        spec = storage.spec
        sizes = spec.out_features, spec.in_features
        matrix = Matrix.empty(*sizes, spec.dtype, spec.device, is_multiplied=spec.is_multiplied)
        if spec.has_float32_sums and not matrix.is_packed:
            # Only products with packed weights keep their sums in float32.
            matrix = Matrix.empty(*sizes, torch.float32, spec.device)
        storage.register_parameter("weight", nn.Parameter(matrix.data, requires_grad=False))
        storage.__dict__["matrix"] = matrix
        return {"weight": PLAIN}

    def load(self, storage: Storage, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy `tensor` [rows, in_features] into the rows from `out_offset` on, in the parameter's dtype.

        Raises ModelLoadError if it does not fit, or holds integers or 8-bit floats, which mean nothing
        without their scales.
        """
        _load(_matrix(storage), name, tensor, out_offset)

    def finish(self, storage: Storage) -> None:
        """Do nothing: `load` put every row where `apply` wants it."""

    def apply(
        self,
        storage: Storage,
        x: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ weight.T + bias."""
        matrix = _matrix(storage)
        if x.dtype != matrix.data.dtype and storage.spec.has_float32_sums:
            x = x.to(matrix.data.dtype)
            bias = None if bias is None else bias.to(matrix.data.dtype)
        return matrix.linear(x, bias, out_dtype=out_dtype, out=out)

    def take(self, storage: Storage, row_ids: Tensor) -> Tensor:
        """Return rows row_ids [n] int64: [n, in_features]. Raises IndexError for one that does not exist."""
        return _matrix(storage).take(row_ids)

    def create_experts(self, num_experts: int, share: Share, spec: StorageSpec) -> GroupedExperts:
        """Store all experts in one piece of memory."""
        sizes = num_experts, spec.out_features, spec.in_features
        experts = Experts.empty(*sizes, spec.dtype, spec.device)
        return GroupedExperts(share, experts, PLAIN, _load, str(self))


def _matrix(storage: Storage) -> Matrix:
    matrix: Matrix = storage.__dict__["matrix"]
    return matrix


def _load(matrix: Matrix | QuantizedMatrix, name: str, tensor: Tensor, out_offset: int) -> None:
    if tensor.dtype not in _FLOAT_DTYPES:
        raise ModelLoadError(
            f"{name} is stored as {tensor.dtype}, a quantized weight, but config.json has no "
            "quantization_config; use the unquantized checkpoint"
        )
    try:
        matrix.load(tensor, out_offset)
    except ValueError as error:
        raise ModelLoadError(f"{name}: {error}") from error
