"""Packing: how a stored tensor represents a logical weight, and where it may be cut.

Sizes are logical: output rows and input columns of the weight [out_features, in_features].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor

from pagewick.errors import ConfigError

Dimension = Literal[0, 1]
ROWS: Final = 0
COLUMNS: Final = 1

_DIMENSION_NAMES: Final = ("output rows", "input columns")


@dataclass(frozen=True, slots=True)
class Axis:
    """One logical dimension of a weight as it appears in a stored tensor.

    Each `unit` of consecutive logical steps is stored in `entries` consecutive entries of the stored dimension
    `stored_dim`, which must not be separated. With `can_cut` false the dimension cannot be cut anywhere.
    step: a unit may be cut at multiples of `step`, by which the reader separates it; both pieces then hold the whole
    unit. 0: units are not cut.
    """

    stored_dim: int
    unit: int = 1
    entries: int = 1
    can_cut: bool = True
    step: int = 0


@dataclass(frozen=True, slots=True)
class Packing:
    """How one stored tensor represents the logical weight [out_features, in_features].

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
    """

    rows: Axis | None = Axis(0)
    columns: Axis | None = Axis(1)

    def axis(self, dim: Dimension) -> Axis | None:
        """Return the axis of logical dimension `dim`."""
        return self.rows if dim == ROWS else self.columns

    def stored_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the stored tensor of a logical weight [rows, columns]."""
        axes = ((self.rows, rows), (self.columns, columns))
        lengths = {a.stored_dim: -(-size // a.unit) * a.entries for a, size in axes if a is not None}
        return tuple(lengths[dim] for dim in sorted(lengths))

    def cut(self, tensor: Tensor, dim: Dimension, start: int, stop: int, size: int) -> Tensor:
        """Return a view of the logical steps [start, stop) of `size` along `dim` in a stored tensor.

        A tensor that does not run along `dim` is returned whole. The last unit may be incomplete (FP8 blocks at the
        edge). A unit that may be cut (`step`) is part of the view as a whole. Raises ConfigError when a cut falls
        inside another unit, or anywhere in a dimension that cannot be cut.
        """
        axis = self.axis(dim)
        if axis is None:
            return tensor
        cuts = [cut for cut in (start, stop) if 0 < cut < size]
        if cuts and not axis.can_cut:
            raise ConfigError(
                f"this checkpoint's {_DIMENSION_NAMES[dim]} cannot be split between ranks "
                "(their order is permuted); use --tensor-parallel-size 1"
            )
        step = axis.step or axis.unit
        if any(cut % step for cut in cuts):
            raise ConfigError(
                f"cannot cut {size} {_DIMENSION_NAMES[dim]} at {start}:{stop}: the weights are packed in "
                f"units of {step}; choose a --tensor-parallel-size that divides {-(-size // step)}"
            )
        stored_start, stored_stop = start // axis.unit * axis.entries, -(-stop // axis.unit) * axis.entries
        return tensor.narrow(axis.stored_dim, stored_start, stored_stop - stored_start)


PLAIN: Final = Packing()
ROW_VECTOR: Final = Packing(columns=None)
