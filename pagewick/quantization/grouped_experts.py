"""Experts that lie in one piece of memory and are multiplied together, or a whole layer in one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from torch import Tensor, nn

from pagewick import kernels
from pagewick.expert_routing import Routing
from pagewick.kernels.matrix import Experts, Matrix
from pagewick.kernels.quantized import QuantizedExperts, QuantizedMatrix
from pagewick.quantization.expert_storage import ExpertMemory, ExpertStorage, MoeOptions, host_tensors
from pagewick.quantization.packing import Packing
from pagewick.quantization.share import Share

LoadRows = Callable[[Matrix | QuantizedMatrix, str, Tensor, int], None]
"""Copies rows of a checkpoint tensor into a matrix, from a row on. Raises ModelLoadError, which names its leaf."""


class GroupedExperts(ExpertStorage):
    """Experts whose weights have one format. packing: how a tensor `weight` of a checkpoint represents one of them."""

    def __init__(
        self, share: Share, experts: Experts | QuantizedExperts, packing: Packing, load_rows: LoadRows, name: str
    ) -> None:
        super().__init__(experts.num_experts, share, name)
        self.experts = experts
        self.weight = nn.Parameter(experts.data, requires_grad=False)
        self._packing, self._load_rows = packing, load_rows

    def expected(self, expert: int, part: str | None) -> list[str]:
        return ["weight"]

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self.load_into(self.experts.data[expert], part, name, tensor)

    def load_into(self, data: Tensor, part: str | None, name: str, tensor: Tensor) -> None:
        """Keep this rank's share of an expert's tensor in `data`, which has the layout of an expert's weight."""
        matrix = self.experts.matrix_in(data)
        for offset, shard in self.share.shards(part, self._packing, tensor):
            self._load_rows(matrix, name, shard, offset)

    def tensors(self, expert: int) -> list[Tensor]:
        return [self.experts.data[expert]]

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        return self.experts.linear(x, expert_ids, bias, out=out)

    def in_host_memory(self, count: int) -> HostExperts:
        return HostExperts(self, count)

    def fused_moe(
        self, down: ExpertStorage, x: Tensor, logits: Tensor, routing: Routing, **options: Unpack[MoeOptions]
    ) -> Tensor:
        if not isinstance(down, GroupedExperts):
            return super().fused_moe(down, x, logits, routing, **options)
        return kernels.fused_moe(x, logits, self.experts, down.experts, routing, **options)


class HostExperts(ExpertMemory):
    """Host memory for `count` experts, in the layout of those on the device."""

    def __init__(self, on_device: GroupedExperts, count: int) -> None:
        data = on_device.experts.data
        self._on_device = on_device
        self._rows = host_tensors(count, data.shape[1:], data.dtype, is_pinned=data.is_cuda)

    def load(self, expert: int, part: str | None, name: str, tensor: Tensor) -> None:
        self._on_device.load_into(self._rows[expert], part, name, tensor)

    def tensors(self, expert: int) -> Sequence[Tensor]:
        return [self._rows[expert]]
