"""Block formats, ggml's and Pagewick's own: weights stay quantized, as products take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pagewick.errors import ModelLoadError
from pagewick.kernels.block_formats import unpack
from pagewick.kernels.matrix import Matrix
from pagewick.kernels.quantized import QuantizedExperts, QuantizedMatrix
from pagewick.quantization.block_formats import (
    BLOCK_FORMATS,
    EXPANSIONS,
    check_block_format,
    kept_format,
    stored_block,
)
from pagewick.quantization.expansion import expand
from pagewick.quantization.grouped_experts import GroupedExperts
from pagewick.quantization.method import LinearMethod, Storage, StorageSpec
from pagewick.quantization.packing import Axis, Packing
from pagewick.quantization.share import Share, check_shape


def dequantize(name: str, rows: Tensor, num_columns: int) -> Tensor:
    """Return rows of blocks [n, bytes] uint8, as a file has them, as numbers [n, num_columns] float32.

    Raises ConfigError for a format that is not supported.
    """
    check_block_format(name, "a tensor")
    return unpack(kept_format(name), expand(name, rows, num_columns) if name in EXPANSIONS else rows).numbers()


@dataclass(frozen=True)
class GgmlMethod(LinearMethod):
    """Weights that files have in the format `name`, in one parameter `weight`, the data of a QuantizedMatrix.

    The matrix has the format kept_format(name), to which a rank expands its share of the weight.
    """

    name: str

    def create(self, storage: Storage) -> Mapping[str, Packing]:
        """Register `weight`, uninitialised."""
        spec = storage.spec
        row_bytes = self._row_bytes(spec.in_features)
        sizes = spec.out_features, spec.in_features
        matrix = QuantizedMatrix.empty(*sizes, kept_format(self.name), row_bytes, spec.dtype, spec.device)
        storage.register_parameter("weight", nn.Parameter(matrix.data, requires_grad=False))
        storage.__dict__["matrix"] = matrix
        return {"weight": self._packing}

    def load(self, storage: Storage, name: str, tensor: Tensor, *, out_offset: int) -> None:
        """Copy rows of blocks [rows, bytes] into the rows from `out_offset` on. Raises ModelLoadError."""
        self._load_rows(_matrix(storage), name, tensor, out_offset, first_column=storage.spec.first_column)

    def finish(self, storage: Storage) -> None:
        """Let the matrix find out what is known only once all rows are there."""
        storage.__dict__["matrix"] = _matrix(storage).finished()

    def apply(
        self,
        storage: Storage,
        x: Tensor,
        bias: Tensor | None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ weight.T + bias, with x quantized, or rounded to bfloat16 for fp8 formats."""
        return _matrix(storage).linear(x, bias, out_dtype=out_dtype, out=out)

    def unpack(self, storage: Storage) -> Tensor:
        """Return the weight as numbers."""
        return self.take(storage, torch.arange(storage.spec.out_features, device=storage.spec.device))

    def take(self, storage: Storage, row_ids: Tensor) -> Tensor:
        """Return rows row_ids [n] int64 as numbers: [n, in_features]. Raises IndexError for one that does not exist."""
        return _matrix(storage).take(row_ids)

    def create_experts(self, num_experts: int, share: Share, spec: StorageSpec) -> GroupedExperts:
        """Store all experts in one piece of memory."""
        sizes = num_experts, spec.out_features, spec.in_features
        row_bytes = self._row_bytes(spec.in_features)
        experts = QuantizedExperts.empty(*sizes, kept_format(self.name), row_bytes, spec.dtype, spec.device)
        load_rows = partial(self._load_rows, first_column=spec.first_column)
        return GroupedExperts(share, experts, self._packing, load_rows, self.name)

    @property
    def _packing(self) -> Packing:
        numbers, num_bytes = stored_block(self.name)
        kept_numbers, _ = self._kept_block
        return Packing(columns=Axis(1, unit=numbers, entries=num_bytes, step=kept_numbers))

    @property
    def _kept_block(self) -> tuple[int, int]:
        """Numbers and bytes of a block in memory."""
        return BLOCK_FORMATS[kept_format(self.name)]

    def _row_bytes(self, in_features: int) -> int:
        numbers, num_bytes = self._kept_block
        return -(-in_features // numbers) * num_bytes

    def _load_rows(
        self, matrix: Matrix | QuantizedMatrix, name: str, rows: Tensor, first_row: int, *, first_column: int
    ) -> None:
        """Store rows of the file's whole blocks that contain the matrix's columns, which begin at first_column."""
        numbers, num_bytes = stored_block(self.name)
        first_block, end_block = first_column // numbers, -(-(first_column + matrix.num_columns) // numbers)
        check_shape(rows, (len(rows), (end_block - first_block) * num_bytes))
        if rows.dtype != torch.uint8:
            raise ModelLoadError(f"{name} holds {rows.dtype}, and must hold the bytes of {self.name}")
        if self.name in EXPANSIONS and matrix.num_columns:
            # The tables of these formats are in host memory.
            rows = expand(self.name, rows.cpu(), (end_block - first_block) * numbers)
            start = self._row_bytes(first_column - first_block * numbers)
            rows = rows[:, start : start + self._row_bytes(matrix.num_columns)]
        if self.name.startswith("fp8_") and _has_nan(torch.unflatten(rows, 1, (-1, num_bytes))[..., -numbers:]):
            raise ModelLoadError(f"{name} holds NaN\n  the checkpoint is damaged; download or copy it again")
        matrix.load(rows, first_row)


def _has_nan(e4m3: Tensor) -> bool:
    """Whether one of the bytes is E4M3's NaN. Rows are looked at in pieces, which bounds temporary memory."""
    return any(bool(((rows & 127) == 127).any()) for rows in torch.split(e4m3, 1024))


def _matrix(storage: Storage) -> QuantizedMatrix:
    matrix: QuantizedMatrix = storage.__dict__["matrix"]
    return matrix
