"""Which rows and columns of a layer's checkpoint tensors a rank keeps. All sizes are logical; Packing converts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from pagewick.quantization.method import COLUMNS, ROWS, Packing
from pagewick.quantization.shapes import check_shape

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint weight of `num_rows` rows, of which this rank keeps `ranges`, in that order.

    name: replaces the layer's own name in the checkpoint; None: the weight has the layer's name.
    """

    name: str | None
    num_rows: int
    ranges: tuple[Range, ...]

    @property
    def num_kept(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a layer's weight, whose parts lie one above the other.

    in_features, columns: input columns of the whole model, and the range of them that this rank keeps.
    """

    parts: tuple[Part, ...]
    in_features: int
    columns: Range

    @property
    def num_rows(self) -> int:
        """Rows that this rank keeps."""
        return sum(part.num_kept for part in self.parts)

    @property
    def num_columns(self) -> int:
        """Columns that this rank keeps."""
        return self.columns[1] - self.columns[0]

    def part(self, name: str | None) -> tuple[Part, int]:
        """A part, and the row where it begins on this rank."""
        offset = 0
        for part in self.parts:
            if part.name == name:
                return part, offset
            offset += part.num_kept
        raise KeyError(name)

    def shards(self, name: str | None, packing: Packing, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(row of this rank, tensor) for each piece that it keeps of a part's whole checkpoint tensor: views.

        Raises ModelLoadError if the tensor does not have the part's shape, and what Packing.cut raises.
        """
        part, offset = self.part(name)
        check_shape(tensor, packing.stored_shape(part.num_rows, self.in_features))
        columns = packing.cut(tensor, COLUMNS, *self.columns, self.in_features)
        for start, stop in part.ranges:
            yield offset, packing.cut(columns, ROWS, start, stop, part.num_rows)
            offset += stop - start


def whole_rows(num_rows: int, in_features: int, columns: Range | None = None) -> Share:
    """All rows of one checkpoint weight that has the layer's name."""
    return Share((Part(None, num_rows, ((0, num_rows),)),), in_features, columns or (0, in_features))
