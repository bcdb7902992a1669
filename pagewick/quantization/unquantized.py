"""Weights in a floating-point dtype, without quantization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Unpack

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ModelLoadError
from pagewick.expert_routing import Routing
from pagewick.kernels.matrix import Experts, Matrix
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage, MoeOptions, host_tensors
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
        return matrix.linear(x, bias, out_dtype=out_dtype, out=out)

    def take(self, storage: Storage, row_ids: Tensor) -> Tensor:
        """Return rows row_ids [n] int64: [n, in_features]. Raises IndexError for one that does not exist."""
        return _matrix(storage).take(row_ids)

    def create_experts(self, num_experts: int, share: Share, spec: StorageSpec) -> UnquantizedExperts:
        """Store all experts in one piece of memory."""
        sizes = num_experts, spec.out_features, spec.in_features
        return UnquantizedExperts(share, Experts.empty(*sizes, spec.dtype, spec.device))


class UnquantizedExperts(ExpertStorage):
    """Experts that are multiplied together, or a whole layer in one operation."""

    def __init__(self, share: Share, experts: Experts) -> None:
        super().__init__(experts.num_experts, share, str(UnquantizedMethod()))
        self.experts = experts
        self.weight = nn.Parameter(experts.data, requires_grad=False)

    def expected(self, part: str | None) -> list[str]:
        return ["weight"]

    def matrix(self, expert: int) -> Matrix:
        """Return the weight of one expert, in the same memory."""
        return self.experts.matrix(expert)

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        _load_shards(self.matrix(expert), self.share, part, name, tensor)

    def tensors(self, expert: int) -> list[Tensor]:
        return [self.experts.data[expert]]

    def linear(self, x: Tensor, expert_ids: Tensor) -> Tensor:
        return self.experts.linear(x, expert_ids)

    def in_host_memory(self, count: int) -> HostExperts:
        return HostExperts(self, count)

    def fused_moe(
        self, down: ExpertStorage, x: Tensor, logits: Tensor, routing: Routing, **options: Unpack[MoeOptions]
    ) -> Tensor:
        if not isinstance(down, UnquantizedExperts):
            return super().fused_moe(down, x, logits, routing, **options)
        return kernels.fused_moe(x, logits, self.experts, down.experts, routing, **options)


class HostExperts(ExpertMemory):
    """Host memory for `count` experts, in the layout of those on the device."""

    def __init__(self, on_device: UnquantizedExperts, count: int) -> None:
        self._share = on_device.share
        self._is_packed = on_device.experts.is_packed
        data = on_device.experts.data
        self._rows = host_tensors(count, data.shape[1:], data.dtype, is_pinned=data.is_cuda)

    def matrix(self, expert: int) -> Matrix:
        """Return the weight of one expert, in the same memory."""
        return Matrix(self._rows[expert], self._share.num_rows, self._share.num_columns, self._is_packed)

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        _load_shards(self.matrix(expert), self._share, part, name, tensor)

    def tensors(self, expert: int) -> list[Tensor]:
        return [self._rows[expert]]


def _matrix(storage: Storage) -> Matrix:
    matrix: Matrix = storage.__dict__["matrix"]
    return matrix


def _load_shards(matrix: Matrix, share: Share, part: str | None, name: str, tensor: Tensor) -> None:
    for offset, shard in share.shards(part, PLAIN, tensor):
        _load(matrix, name, shard, offset)


def _load(matrix: Matrix, name: str, tensor: Tensor, out_offset: int) -> None:
    if tensor.dtype not in _FLOAT_DTYPES:
        raise ModelLoadError(
            f"{name} is stored as {tensor.dtype}, a quantized weight, but config.json has no "
            "quantization_config; use the unquantized checkpoint"
        )
    try:
        matrix.load(tensor, out_offset)
    except ValueError as error:
        raise ModelLoadError(f"{name}: {error}") from error
