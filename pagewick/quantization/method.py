"""How a linear layer stores and multiplies its weight: four verbs, and how the stored weight may be cut.

Knows neither model names nor file formats: it is handed named tensors. A layer computes its rank's share in
logical units (output rows, input columns), cuts each tensor through the tensor's Packing, and calls `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor, nn

from pagewick.errors import ConfigError

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


class LinearMethod(Protocol):
    """One way to hold a weight [out_features, in_features]; both numbers are this rank's share.

    Called in this order: `create` once, `load` for every shard, `finish` once, then `apply` for ever. Methods
    keep no per-layer state: it lives in the layer's parameters. The bias is the layer's, not the method's.
    """

    def create(
        self,
        layer: nn.Module,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Mapping[str, Packing]:
        """Register uninitialised parameters on the layer; returns the Packing of each, by name."""
        ...

    def load(self, layer: nn.Module, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy one tensor, already cut to this rank, into the rows from `out_offset` on (logical units).

        Raises ModelLoadError when shape or dtype do not fit; the message holds both.
        """
        ...

    def finish(self, layer: nn.Module) -> None:
        """Bring the parameters into the layout that `apply` wants; once, after everything is loaded."""
        ...

    def apply(
        self, layer: nn.Module, x: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x [..., in_features] times the transposed weight, plus bias: [..., out_features], in out_dtype or x's."""
        ...
