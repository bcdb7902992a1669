"""Formats that differ from another one in one part: factors of columns, and scales in another order. Imports no torch.

N: rows, C: columns of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp8 import matrix_shape
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedWeight, check_part
from pagewick.weights.packed.sizes import SCALE_DTYPES
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

FACTORS: Final = ".act_pre_scale"
_SCALES: Final = ".weight_scale"
# Rows and columns of a tile of swizzled scales, and the rows that lie beside each other in one.
_TILE_ROWS, _TILE_COLUMNS, _STRIPE = 128, 4, 32


@dataclass(frozen=True, slots=True)
class FactoredFormat(PackedFormat):
    """Weights of the format `inner`, the activations for which are multiplied by a factor for each column [C].

    The factors are put into the weight instead, which becomes numbers: each is multiplied in float32.
    """

    inner: PackedFormat

    @property
    def label(self) -> str:
        return self.inner.label

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        return replace(self.inner.planned(name, rows, columns), dtype=NUMBERS)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        found = self._inner(prefix, parts)
        columns = found.shape[1]
        check_part(parts[FACTORS], SCALE_DTYPES, (columns,), (1, columns))
        return replace(found, stored_type=NUMBERS, format=self, parts=parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        factors = weight.part(FACTORS, get).float().view(1, -1)
        if not bool(factors.isfinite().all()):
            raise ModelLoadError("a factor of its columns is infinite or NaN\n  download the file again")
        return self.inner.numbers(self._inner(weight.prefix, weight.parts), get) * factors

    def _inner(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        return self.inner.weight(prefix, {suffix: part for suffix, part in parts.items() if suffix != FACTORS})


@dataclass(frozen=True, slots=True)
class SwizzledFormat(PackedFormat):
    """Weights of the format `inner`, whose scales [N, C / group_size] are in tiles, which follow each other row by row.

    A tile has 128 rows and 4 columns, and 32 x 4 x 4 numbers: the rows n, 32 + n, 64 + n and 96 + n lie beside each
    other. Tiles at the end are filled up. numbers_per_byte: of .weight.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout.
    """

    inner: PackedFormat
    group_size: int
    numbers_per_byte: int

    @property
    def label(self) -> str:
        return self.inner.label

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        return self.inner.planned(name, rows, columns)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        return replace(self._inner(prefix, parts), format=self, parts=parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        inner = self._inner(weight.prefix, weight.parts)
        scales = inner.parts[_SCALES]

        def in_order(name: str) -> Tensor:
            found = get(name)
            return _unswizzled(found, *scales.shape) if name == scales.name else found

        return self.inner.read(inner, in_order)

    def _inner(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        rows, width = matrix_shape(parts[".weight"])
        groups = width * self.numbers_per_byte // self.group_size
        scales = parts[_SCALES]
        tiles = -(-rows // _TILE_ROWS), -(-groups // _TILE_COLUMNS)
        check_part(scales, (scales.dtype,), (tiles[0] * _STRIPE, tiles[1] * _TILE_COLUMNS**2))
        ordered = replace(scales, shape=(rows, groups), num_bytes=rows * groups)
        return self.inner.weight(prefix, {**parts, _SCALES: ordered})


def _unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales of one byte [rows, columns] from those of all tiles."""
    import torch

    tiles = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    found = scales.contiguous().view(torch.uint8).view(*tiles, _STRIPE, _TILE_ROWS // _STRIPE, _TILE_COLUMNS)
    found = found.permute(0, 3, 2, 1, 4).reshape(tiles[0] * _TILE_ROWS, tiles[1] * _TILE_COLUMNS)
    return found[:rows, :columns].contiguous().view(scales.dtype)
