"""LinearMethod: how a format of weights is stored and multiplied.

Knows neither model names nor file formats: it is given named tensors. weight.py computes a rank's share in
logical units (output rows, input columns), cuts each tensor through the tensor's Packing, and calls `load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewick.quantization.expert_storage import ExpertStorage
from pagewick.quantization.packing import Packing
from pagewick.quantization.share import Share


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """The contents of one storage: neighbouring parts of a layer that have the same format.

    parts: name and number of rows of each part, from top to bottom, counting the rows that this rank keeps.
    in_features: number of columns that this rank keeps. first_column: the first of them in the checkpoint.
    dtype: data type of activations, and of weights that have no format of their own.
    is_multiplied: False if rows are only looked up, as in an embedding that is not the vocabulary head as well.
    has_float32_sums: `apply` must return float32 sums that were not rounded to dtype first, as a router needs.
    """

    parts: tuple[tuple[str | None, int], ...]
    in_features: int
    dtype: torch.dtype
    device: torch.device
    is_multiplied: bool = True
    has_float32_sums: bool = False
    first_column: int = 0

    @property
    def out_features(self) -> int:
        return sum(num_rows for _, num_rows in self.parts)


class Storage(nn.Module):
    """A weight [out_features, in_features] as a method holds it: parameters that `create` registers."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__()
        self.spec = spec


class LinearMethod(ABC):
    """A format of weights.

    Four methods are called in this order: `create` once, `load` for every shard, `finish` once, then `apply` for every
    step. The others have defaults that work with these four; override them where speed matters.

    A method is a value without state, such as a frozen dataclass of the format's numbers: neighbouring parts of a layer
    whose methods are equal share one storage. The layer holds the bias; the method only adds it.
    """

    @abstractmethod
    def create(self, storage: Storage) -> Mapping[str, Packing]:
        """Register uninitialised parameters for storage.spec; return each checkpoint tensor's Packing, by leaf."""

    @abstractmethod
    def load(self, storage: Storage, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy one tensor, already cut to this rank, into the rows from `out_offset` on (logical units).

        Raises ModelLoadError when shape or dtype do not fit; the message holds both.
        """

    @abstractmethod
    def finish(self, storage: Storage) -> None:
        """Bring the parameters into the layout that `apply` wants. Called once, after everything is loaded."""

    @abstractmethod
    def apply(
        self,
        storage: Storage,
        x: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x [..., in_features] times the transposed weight, plus bias: [..., out_features], in out_dtype or x's.

        out: memory for the result; its rows need not be adjacent, as in a slice of columns. None: new memory.
        """

    def unpack(self, storage: Storage) -> Tensor:
        """Return the weight in the activations' dtype: [out_features, in_features]. Default: its product with 1."""
        spec = storage.spec
        return self.apply(storage, torch.eye(spec.in_features, dtype=spec.dtype, device=spec.device), None).t()

    def take(self, storage: Storage, row_ids: Tensor) -> Tensor:
        """Return rows row_ids [n] int64 in the activations' dtype: [n, in_features]. Default: unpacks all rows."""
        return self.unpack(storage)[row_ids]

    def create_experts(self, num_experts: int, share: Share, spec: StorageSpec) -> ExpertStorage | None:
        """Make one storage for a weight of every expert, to be multiplied together; spec is that of one expert.

        Default: None; every expert then has a storage of its own.
        """
        return None
