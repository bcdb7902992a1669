"""QuantizedMatrix: a quantized weight in the layout that products on its device want."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pagewick.kernels import TABLE, fp8_activations, gather_quantized_rows, grouped_linear, quantized_linear
from pagewick.kernels.dispatch import QuantizedLayout
from pagewick.kernels.huge_pages import empty_weight
from pagewick.kernels.options import StoredExperts, StoredQuantized


def quantized_layout(name: str, device: torch.device | str, dtype: torch.dtype) -> QuantizedLayout | None:
    """Return how weights of a format are to lie on a device, for activations of a dtype; None: as files have them."""
    backend = TABLE.backend("quantized_linear", torch.device(device).type, dtype)
    return None if backend is None else backend.quantized_weights.get(name)


def _empty(
    count: tuple[int, ...],
    num_rows: int,
    num_columns: int,
    name: str,
    row_bytes: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, bool]:
    """Return room for [*count] weights, and whether it is for packed ones."""
    layout = quantized_layout(name, device, dtype)
    shape = (num_rows, row_bytes) if layout is None else layout.packed_shape(num_rows, num_columns)
    return empty_weight((*count, *shape), torch.uint8, device), layout is not None


@dataclass(frozen=True, slots=True)
class QuantizedMatrix(StoredQuantized):
    """A quantized weight of num_rows outputs and num_columns inputs, for activations of `dtype`.

    device: the data lies as products on this device want it, but may itself be in host memory.
    """

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def empty(
        cls, num_rows: int, num_columns: int, name: str, row_bytes: int, dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedMatrix:
        """Return room for a weight of the format `name`, whose rows have `row_bytes` bytes in files."""
        data, is_packed = _empty((), num_rows, num_columns, name, row_bytes, dtype, device)
        return cls(data, num_rows, num_columns, name, is_packed, dtype, data.device)

    def load(self, rows: Tensor, first_row: int) -> None:
        """Store rows of blocks [n, bytes] uint8 as the rows from `first_row` on.

        Raises ValueError if they do not fit.
        """
        if rows.ndim != 2 or not 0 <= first_row <= self.num_rows - len(rows):
            raise ValueError(f"rows {list(rows.shape)} do not fit into {self.num_rows} rows at {first_row}")
        if not self.is_packed:
            self.data[first_row : first_row + len(rows)].copy_(rows)
            return
        layout = quantized_layout(self.format, self.device, self.dtype)
        assert layout is not None, "it was there when this was made"
        layout.pack_rows(rows, self.data, first_row)

    def finished(self) -> QuantizedMatrix:
        """Return the matrix as products want it once all rows are loaded."""
        layout = quantized_layout(self.format, self.device, self.dtype) if fp8_activations.is_required() else None
        if not self.is_packed or layout is None or layout.row_scales is None:
            return self
        return replace(self, row_scales=layout.row_scales(self.data, self.num_columns))

    def take(self, row_ids: Tensor) -> Tensor:
        """Return rows row_ids [n] int64 as numbers: [n, num_columns]. Raises IndexError for a missing row."""
        return gather_quantized_rows(row_ids, self, self.dtype)

    def linear(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x [..., num_columns] times this weight transposed, plus bias [num_rows]: [..., num_rows].

        Activations are quantized as reference_quantized.py says. A row of the result has the same bits whatever other
        rows x has. out: a tensor to write the result to, in its dtype; its rows may lie apart.
        """
        return quantized_linear(x, self, bias, out_dtype, out)


@dataclass(frozen=True, slots=True)
class QuantizedExperts(StoredExperts):
    """The quantized weights of num_experts experts in one piece of memory, for activations of `dtype`."""

    dtype: torch.dtype = field(kw_only=True)

    @classmethod
    def empty(
        cls,
        num_experts: int,
        num_rows: int,
        num_columns: int,
        name: str,
        row_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> QuantizedExperts:
        """Return room for weights; the arguments are those of QuantizedMatrix.empty."""
        data, is_packed = _empty((num_experts,), num_rows, num_columns, name, row_bytes, dtype, device)
        return cls(data, num_experts, num_rows, num_columns, is_packed, name, dtype=dtype)

    def matrix_in(self, data: Tensor) -> QuantizedMatrix:
        """Return the weight of one expert that lies in `data`, in the layout of these."""
        assert self.format is not None, "these are quantized"
        shape = (self.num_rows, self.num_columns)
        return QuantizedMatrix(data, *shape, self.format, self.is_packed, self.dtype, self.data.device)

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return the product of each choice with its expert's weight, plus bias [E, num_rows]: [T * A, num_rows].

        x: [T, num_columns], or [T * A, num_columns] with a row for each choice; expert_ids: [T, A] int32. A row has the
        bits that QuantizedMatrix.linear gives it, whose `out` this one has, too. Raises IndexError for an id outside
        0 .. num_experts - 1.
        """
        return grouped_linear(x, self, expert_ids, bias, out)
