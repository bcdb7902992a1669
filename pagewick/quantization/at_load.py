"""Weights that a checkpoint stores as numbers, and that are quantized to ggml's block formats while they load."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.kernels import quantize_weight
from pagewick.kernels.matrix import Matrix
from pagewick.kernels.quantized import QuantizedMatrix
from pagewick.quantization.block_formats import stored_block
from pagewick.quantization.ggml import GgmlMethod
from pagewick.quantization.packing import Axis, Packing
from pagewick.quantization.share import check_floats


class QuantizingMethod(GgmlMethod):
    """GgmlMethod for weights that are not in blocks yet: `load` quantizes the rows and columns that the rank keeps.

    A block depends on its own numbers only, so that these are the blocks of the whole weight.
    """

    @property
    def _packing(self) -> Packing:
        numbers, _ = stored_block(self.name)
        return Packing(columns=Axis(1, unit=numbers, entries=numbers))

    def _load_rows(
        self, matrix: Matrix | QuantizedMatrix, name: str, rows: Tensor, first_row: int, *, first_column: int
    ) -> None:
        check_floats(rows, (len(rows), matrix.num_columns))
        super()._load_rows(matrix, name, quantize_rows(self.name, rows), first_row, first_column=first_column)


def quantize_rows(name: str, rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return rows of numbers [n, columns] as rows of blocks [n, bytes] uint8 of the format `name`.

    importance: [columns], how much the error of each counts. Scales are searched, as decision 26 describes. Raises
    ModelLoadError for numbers that the format cannot store.
    """
    try:
        return quantize_weight(rows.float() if rows.dtype == torch.float64 else rows, name, importance)
    except ValueError as error:
        raise ModelLoadError(
            f"it cannot be quantized: {error}\n  leave --quantization out, or check the checkpoint"
        ) from error
