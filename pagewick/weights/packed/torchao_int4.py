"""torchao's whole numbers of 4 bits, in groups of columns with a scale and a zero point that is a number, too.

For a weight of N rows and C columns with G groups of columns; a number is scale * level + zero, for levels -8 .. 7:

    Int4Tensor                  qdata [N, C / 2] bytes of two levels in two's complement, the lower half first;
                                scale, zero_point [G, N]. For activations in FP8, all zero points are 0
    Int4TilePackedTo4dTensor    qdata [N / 8, C / 128, 32, 4] int32, rounded up, with levels plus 8: a word holds eight
                                levels of a row, in the order of the threads that multiply a tile of 8 rows and 16
                                columns; scale_and_zero [G, N, 2]. Columns are filled up to 1024 and rows to 8

Source: https://github.com/pytorch/ao (quantization/quantize_/workflows/int4) and PyTorch's
aten/src/ATen/native/cuda/int4mm.cu (matrix_to_m16n8k16_Bint4_layout) for NVIDIA's GPUs. The words of AMD's GPUs have
another order and the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.fp8 import ZERO_POINTS
from pagewick.weights.packed.layout import NUMBERS, PackedFormat, PackedWeight, check_part
from pagewick.weights.packed.sizes import SCALE_DTYPES, group_label, num_groups, stored_type_of
from pagewick.weights.tensor_headers import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from pagewick.weights.packed.layout import GetTensor

SCALES_AND_ZEROS: Final = ".scale_and_zero"
_VALUES, _SCALES = ".weight", ".weight_scale"
# Numbers that are decoded at a time; temporary memory is a few times as many bytes.
_CHUNK_SIZE: Final = 2**21
# A tile's rows; the columns to which a weight is filled up; the columns of four words; threads; their words.
_TILE_ROWS, _FULL_COLUMNS, _TILE_COLUMNS, _THREADS, _WORDS = 8, 1024, 128, 32, 4


@dataclass(frozen=True, slots=True)
class TorchaoInt4Format(PackedFormat):
    """is_tiled: Int4TilePackedTo4dTensor. has_zeros: zero points may differ from 0. shape: of the weight, if known."""

    group_size: int
    is_tiled: bool = False
    has_zeros: bool = True
    shape: tuple[int, int] = (0, 0)

    @property
    def label(self) -> str:
        return f"int4 {group_label(self.group_size)}"

    def planned(self, name: str, rows: int, columns: int) -> TensorInfo:
        num_bytes = rows * columns // 2 + 4 * rows * num_groups(columns, self.group_size)
        return TensorInfo(name, self._kind(columns), (rows, columns), num_bytes, label=self.label)

    def weight(self, prefix: str, parts: Mapping[str, TensorInfo]) -> PackedWeight:
        rows, columns = self.shape
        groups = num_groups(columns, self.group_size)
        if self.is_tiled:
            rows_stored, columns_stored = self._stored_shape()
            tiles = rows_stored // _TILE_ROWS, columns_stored // _TILE_COLUMNS
            check_part(parts[_VALUES], ("I32",), (*tiles, _THREADS, _WORDS))
            if columns_stored % self.group_size:
                raise ModelLoadError(
                    f"cannot load {prefix}.weight: groups of {self.group_size} do not fit {columns_stored} columns\n"
                    "  download the file again"
                )
            check_part(parts[SCALES_AND_ZEROS], SCALE_DTYPES, (columns_stored // self.group_size, rows_stored, 2))
        else:
            if columns % 2:
                raise ModelLoadError(
                    f"cannot load {prefix}.weight: its {columns} columns are not even\n  download the file again"
                )
            check_part(parts[_VALUES], ("I8", "U8"), (rows, columns // 2))
            for suffix in (_SCALES, ZERO_POINTS):
                check_part(parts[suffix], SCALE_DTYPES, (groups, rows))
        return PackedWeight(f"{prefix}.weight", self.shape, self._kind(columns), self, parts)

    def read(self, weight: PackedWeight, get: GetTensor) -> Tensor:
        import torch

        from pagewick.weights.packed.integers import encode

        if self.is_tiled:
            scales, zeros = weight.part(SCALES_AND_ZEROS, get).unbind(-1)
        else:
            scales, zeros = weight.part(_SCALES, get), weight.part(ZERO_POINTS, get)
        for name, found in (("scale", scales), ("zero point", zeros)):
            if not bool(found.isfinite().all()):
                raise ModelLoadError(f"a {name} is infinite or NaN\n  download the file again")
        rows, columns = self.shape
        scales, zeros = scales[:, :rows].t(), zeros[:, :rows].t()
        values = weight.part(_VALUES, get)
        if not self.has_zeros:
            if bool(zeros.any()):
                raise ModelLoadError("it has zero points, which torchao has for activations in bfloat16 alone")
            middles = torch.full(scales.shape, 8, dtype=torch.int16)
            size = self.group_size
            return encode(
                weight.stored_type, self.shape, lambda *ends: self._levels(values, *ends), scales, middles, size
            )
        groups = torch.arange(columns) // self.group_size
        found = torch.empty(rows, columns)
        step = max(_TILE_ROWS, _CHUNK_SIZE // columns // _TILE_ROWS * _TILE_ROWS)
        for first in range(0, rows, step):
            end = min(rows, first + step)
            factors, offsets = (part[first:end].float().index_select(1, groups) for part in (scales, zeros))
            found[first:end] = (self._levels(values, first, end).float() - 8) * factors + offsets
        return found

    def _levels(self, stored: Tensor, first: int, end: int) -> Tensor:
        """Return the levels plus 8 of rows [n, C] uint8; tiles begin at `first`."""
        import torch

        if not self.is_tiled:
            octets = stored[first:end].contiguous().view(torch.uint8)
            return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1) ^ 8
        tiles = stored[first // _TILE_ROWS : -(-end // _TILE_ROWS)].contiguous()
        octets = tiles.view(torch.uint8).view(*tiles.shape[:2], _TILE_ROWS, 4, _WORDS, 2, 2)
        # A word's levels: four of even columns, then four of odd ones, 8 columns apart each.
        halves = torch.stack([octets & 15, octets >> 4], dim=-1)
        in_order = halves.flatten(-2).permute(0, 2, 1, 4, 6, 3, 5)
        return in_order.reshape(len(tiles) * _TILE_ROWS, -1)[: end - first, : self.shape[1]]

    def _stored_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-columns // _FULL_COLUMNS) * _FULL_COLUMNS

    def _kind(self, columns: int) -> str:
        return NUMBERS if self.has_zeros else stored_type_of(4, columns, self.group_size, "F16")
