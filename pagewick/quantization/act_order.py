"""Weights whose columns are sorted, as in GPTQ's act-order: inputs are gathered in the columns' order first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ModelLoadError
from pagewick.quantization.block_formats import ORDER_LEAF
from pagewick.quantization.method import LinearMethod, Storage
from pagewick.quantization.packing import Axis, Packing

_ORDER: Final = Packing(rows=None, columns=Axis(0, can_cut=False))


@dataclass(frozen=True)
class OrderedMethod(LinearMethod):
    """The method `inner` for a weight with sorted columns: column i is the model's column column_order[i].

    part: last component of the weight's name. Parts of a fused layer have orders of their own, so that their methods
    differ and each has a storage of its own. Ranks cannot share columns.
    """

    inner: LinearMethod
    part: str

    def create(self, storage: Storage) -> Mapping[str, Packing]:
        """Register the inner parameters and the order, uninitialised."""
        spec = storage.spec
        order = torch.empty(spec.in_features, dtype=torch.int64, device=spec.device)
        storage.register_parameter(ORDER_LEAF, nn.Parameter(order, requires_grad=False))
        packings = self.inner.create(storage)
        return {**{leaf: _fixed(packing) for leaf, packing in packings.items()}, ORDER_LEAF: _ORDER}

    def load(self, storage: Storage, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy one tensor. Raises ModelLoadError if the order or the inner tensor is wrong."""
        if name != ORDER_LEAF:
            self.inner.load(storage, name, tensor, out_offset=out_offset)
            return
        columns = torch.arange(storage.spec.in_features, device=tensor.device)
        if not torch.equal(tensor.sort().values, columns):
            raise ModelLoadError(f"{name} does not list every column once")
        storage.get_parameter(ORDER_LEAF).copy_(tensor)

    def finish(self, storage: Storage) -> None:
        self.inner.finish(storage)

    def apply(
        self,
        storage: Storage,
        x: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the product with the gathered inputs."""
        gathered = kernels.gather_columns(x, storage.get_parameter(ORDER_LEAF))
        return self.inner.apply(storage, gathered, bias, out_dtype=out_dtype, out=out)

    def unpack(self, storage: Storage) -> Tensor:
        """Return the weight with the columns in the model's order."""
        return self._in_order(storage, self.inner.unpack(storage))

    def take(self, storage: Storage, row_ids: Tensor) -> Tensor:
        """Return rows with the columns in the model's order."""
        return self._in_order(storage, self.inner.take(storage, row_ids))

    def _in_order(self, storage: Storage, rows: Tensor) -> Tensor:
        found = torch.empty_like(rows)
        found[:, storage.get_parameter(ORDER_LEAF)] = rows
        return found


def _fixed(packing: Packing) -> Packing:
    """Return the packing of a tensor whose columns cannot be cut."""
    columns = packing.columns
    return packing if columns is None else replace(packing, columns=replace(columns, can_cut=False))
