"""How a weight is stored and multiplied: the four verbs of a LinearMethod, and how stored tensors may be cut.

Knows neither model names nor file formats: it is handed named tensors. weight.py computes a rank's share in
logical units (output rows, input columns), cuts each tensor through the tensor's Packing, and calls `load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor, nn

from pagewick.errors import ConfigError

if TYPE_CHECKING:
    from pagewick.quantization.experts import ExpertStorage
    from pagewick.quantization.share import Share

Dimension = Literal[0, 1]
ROWS: Final = 0
COLUMNS: Final = 1

_DIMENSION_NAMES: Final = ("output rows", "input columns")


@dataclass(frozen=True, slots=True)
class Axis:
    """One logical dimension of a weight as it appears in a stored tensor.

    `unit` logical steps are held by `entries` consecutive entries of the stored dimension `stored_dim` and
    cannot be separated. With `can_cut` false the dimension cannot be cut anywhere.
    """

    stored_dim: int
    unit: int = 1
    entries: int = 1
    can_cut: bool = True


@dataclass(frozen=True, slots=True)
class Packing:
    """How the logical weight [out_features, in_features] lies in one stored tensor.

    `rows` and `columns` describe logical dimension 0 and 1; None means that the tensor does not run along
    that dimension, so every rank keeps all of it. Formats, with O = out_features and I = in_features:

    | stored tensor | rows | columns |
    |---|---|---|
    | unquantized weight [O, I] | Axis(0) | Axis(1) |
    | bias, or scale per row [O] | Axis(0) | None |
    | GGML Q4_K blocks [O, I / 256 * 144] bytes | Axis(0) | Axis(1, unit=256, entries=144) |
    | GPTQ qweight [I / 8, O] int32 | Axis(1) | Axis(0, unit=8) |
    | GPTQ scales [I / 128, O] | Axis(1) | Axis(0, unit=128) |
    | GPTQ qzeros [I / 128, O / 8] int32 | Axis(1, unit=8) | Axis(0, unit=128) |
    | GPTQ g_idx [I], act-order | None | Axis(0, can_cut=False) |
    | AWQ qweight [I, O / 8] int32 | Axis(1, unit=8) | Axis(0) |
    | FP8 block scales [ceil(O / 128), ceil(I / 128)] | Axis(0, unit=128) | Axis(1, unit=128) |
    | FP8 scale of the whole tensor [] | None | None |

    A layer that holds several tensors cuts at a multiple of the largest `unit` among them (units of one
    format divide each other).
    """

    rows: Axis | None = Axis(0)
    columns: Axis | None = Axis(1)

    def axis(self, dim: Dimension) -> Axis | None:
        """The axis of logical dimension `dim`."""
        return self.rows if dim == ROWS else self.columns

    def unit(self, dim: Dimension) -> int:
        """Logical steps along `dim` that stay together; 1 where any cut is possible."""
        axis = self.axis(dim)
        return 1 if axis is None else axis.unit

    def can_shard(self, dim: Dimension, shard_size: int) -> bool:
        """Whether `dim` may be cut after every `shard_size` logical steps."""
        axis = self.axis(dim)
        return axis is None or (axis.can_cut and shard_size % axis.unit == 0)

    def stored_range(self, dim: Dimension, start: int, stop: int, size: int) -> tuple[int, int]:
        """Entries of the stored dimension that hold the logical steps [start, stop) of `size`.

        The last unit may be incomplete (FP8 blocks at the edge). Raises ConfigError when a cut falls inside a
        unit, or anywhere in a dimension that cannot be cut; ValueError if the tensor does not have `dim`.
        """
        axis = self.axis(dim)
        if axis is None:
            raise ValueError(f"the tensor does not run along logical dimension {dim}")
        cuts = [cut for cut in (start, stop) if 0 < cut < size]
        if cuts and not axis.can_cut:
            raise ConfigError(
                f"this checkpoint's {_DIMENSION_NAMES[dim]} cannot be split between ranks "
                "(their order is permuted); use --tensor-parallel-size 1"
            )
        if any(cut % axis.unit for cut in cuts):
            raise ConfigError(
                f"cannot cut {size} {_DIMENSION_NAMES[dim]} at {start}:{stop}: the weights are packed in "
                f"units of {axis.unit}; choose a --tensor-parallel-size that divides {-(-size // axis.unit)}"
            )
        return start // axis.unit * axis.entries, -(-stop // axis.unit) * axis.entries

    def stored_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the stored tensor of a logical weight [rows, columns]."""
        axes = ((self.rows, rows), (self.columns, columns))
        lengths = {a.stored_dim: -(-size // a.unit) * a.entries for a, size in axes if a is not None}
        return tuple(lengths[dim] for dim in sorted(lengths))

    def cut(self, tensor: Tensor, dim: Dimension, start: int, stop: int, size: int) -> Tensor:
        """The part of a stored tensor for the logical steps [start, stop) of `size` along `dim`: a view.

        A tensor that does not run along `dim` is returned whole. Raises as stored_range does.
        """
        axis = self.axis(dim)
        if axis is None:
            return tensor
        stored_start, stored_stop = self.stored_range(dim, start, stop, size)
        return tensor.narrow(axis.stored_dim, stored_start, stored_stop - stored_start)


PLAIN: Final = Packing()
ROW_VECTOR: Final = Packing(columns=None)


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """What one storage is to hold: neighbouring parts of a layer that have the same format.

    parts: name and number of rows of each, from top to bottom; the rows are those that this rank keeps.
    in_features: columns that this rank keeps.
    dtype: of the activations, and of weights that have no format of their own.
    is_multiplied: False if rows are only looked up, as in an embedding that is not the head as well.
    has_float32_sums: `apply` will be asked for float32 and must not round its sums to dtype first, as in a router.
    """

    parts: tuple[tuple[str | None, int], ...]
    in_features: int
    dtype: torch.dtype
    device: torch.device
    is_multiplied: bool = True
    has_float32_sums: bool = False

    @property
    def out_features(self) -> int:
        return sum(num_rows for _, num_rows in self.parts)


class Storage(nn.Module):
    """What a method keeps of a weight [out_features, in_features]: its parameters, registered by `create`."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__()
        self.spec = spec


class LinearMethod(ABC):
    """A format of weights.

    Four verbs, called in this order: `create` once, `load` for every shard, `finish` once, then `apply` for ever.
    The other methods have defaults that work with these four; override them where the format is used in that place
    and speed matters.

    A method is a value without state, such as a frozen dataclass of the format's numbers: neighbouring parts of a layer
    whose methods are equal share one storage. The bias is the layer's, not the method's.
    """

    @abstractmethod
    def create(self, storage: Storage) -> Mapping[str, Packing]:
        """Register uninitialised parameters for storage.spec; returns each checkpoint tensor's Packing, by leaf."""

    @abstractmethod
    def load(self, storage: Storage, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy one tensor, already cut to this rank, into the rows from `out_offset` on (logical units).

        Raises ModelLoadError when shape or dtype do not fit; the message holds both.
        """

    @abstractmethod
    def finish(self, storage: Storage) -> None:
        """Bring the parameters into the layout that `apply` wants; once, after everything is loaded."""

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
        """x [..., in_features] times the transposed weight, plus bias: [..., out_features], in out_dtype or x's.

        out: where to write the result, instead of new memory; its rows may lie apart, as in a slice of columns.
        """

    def unpack(self, storage: Storage) -> Tensor:
        """The weight in the dtype of the activations: [out_features, in_features]. Default: its product with 1."""
        spec = storage.spec
        return self.apply(storage, torch.eye(spec.in_features, dtype=spec.dtype, device=spec.device), None).t()

    def take(self, storage: Storage, row_ids: Tensor) -> Tensor:
        """Rows row_ids [n] int64 in the dtype of the activations: [n, in_features]. Default: unpacks all rows."""
        return self.unpack(storage)[row_ids]

    def create_experts(self, num_experts: int, share: Share, spec: StorageSpec) -> ExpertStorage | None:
        """One weight for each of num_experts experts, multiplied together; spec: of one of them.

        Default: None; every expert then has a storage of its own.
        """
        return None
