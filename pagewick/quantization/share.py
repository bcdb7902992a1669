"""Share: the rows and columns of a layer's checkpoint tensors that a rank keeps, and the checks of these tensors.

Sizes are logical: see packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.quantization.packing import COLUMNS, ROWS, Packing

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint weight. num_rows: rows in the checkpoint. ranges: rows that this rank keeps, in that order.

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
    """A rank's share of a layer's weight. parts: from top to bottom. in_features: columns in the checkpoint.

    columns: the range of them that this rank keeps.
    """

    parts: tuple[Part, ...]
    in_features: int
    columns: Range

    @property
    def num_rows(self) -> int:
        """Number of rows that this rank keeps."""
        return sum(part.num_kept for part in self.parts)

    @property
    def num_columns(self) -> int:
        """Number of columns that this rank keeps."""
        return self.columns[1] - self.columns[0]

    def part(self, name: str | None) -> tuple[Part, int]:
        """Return a part, and the row where it begins on this rank."""
        offset = 0
        for part in self.parts:
            if part.name == name:
                return part, offset
            offset += part.num_kept
        raise KeyError(name)

    def shards(self, name: str | None, packing: Packing, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (row on this rank, view) for each piece that the rank keeps of a part's checkpoint tensor.

        Raises ModelLoadError if the tensor does not have the part's shape, and ConfigError as Packing.cut does.
        """
        part, offset = self.part(name)
        check_shape(tensor, packing.stored_shape(part.num_rows, self.in_features))
        columns = packing.cut(tensor, COLUMNS, *self.columns, self.in_features)
        for start, stop in part.ranges:
            yield offset, packing.cut(columns, ROWS, start, stop, part.num_rows)
            offset += stop - start


def whole_rows(num_rows: int, in_features: int, columns: Range | None = None) -> Share:
    """Return the share that holds all rows of a weight that has the layer's name."""
    return Share((Part(None, num_rows, ((0, num_rows),)),), in_features, columns or (0, in_features))


def check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ModelLoadError, with both shapes, if a checkpoint's tensor has another shape than config.json implies."""
    if tuple(tensor.shape) != expected:
        raise ModelLoadError(
            f"its shape is {list(tensor.shape)}, and config.json says {list(expected)}\n"
            "  config.json and the weights do not belong together; download or copy both again"
        )


def check_floats(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """As check_shape; also raises ModelLoadError unless the tensor holds floating-point numbers of 16 bits or more."""
    check_shape(tensor, expected)
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ModelLoadError(f"it holds {tensor.dtype}, and must hold bfloat16, float16 or float32")
