"""Matrix: a weight in the layout that products on its device want."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.kernels.dispatch import WeightLayout
from pagewick.kernels.huge_pages import empty_weight, huge_zeros
from pagewick.kernels.operations import TABLE, gather_rows, linear


def weight_layout(device: torch.device | str, dtype: torch.dtype) -> WeightLayout | None:
    """How weights of a dtype are to lie on a device; None: [num_rows, num_columns]."""
    backend = TABLE.backend("linear", torch.device(device).type, dtype)
    return None if backend is None else backend.weights


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of num_rows outputs and num_columns inputs.

    data: [num_rows, num_columns], or packed as weight_layout says.
    """

    data: Tensor
    num_rows: int
    num_columns: int
    is_packed: bool

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        is_multiplied: bool = True,
    ) -> Matrix:
        """Room for a weight. Without is_multiplied, `linear` will not be called: rows stay as they are."""
        layout = weight_layout(device, dtype) if is_multiplied else None
        if layout is None:
            return cls(empty_weight((num_rows, num_columns), dtype, device), num_rows, num_columns, False)
        shape = layout.packed_shape(num_rows, num_columns, dtype)
        return cls(huge_zeros(shape, dtype), num_rows, num_columns, True)

    def load(self, rows: Tensor, first_row: int) -> None:
        """Put `rows` [n, num_columns] in their place, from `first_row` on, in this weight's dtype.

        Raises ValueError if they do not fit.
        """
        if rows.ndim != 2 or rows.shape[1] != self.num_columns or not 0 <= first_row <= self.num_rows - len(rows):
            raise ValueError(
                f"rows {list(rows.shape)} do not fit into [{self.num_rows}, {self.num_columns}] at {first_row}"
            )
        if not self.is_packed:
            self.data[first_row : first_row + len(rows)].copy_(rows)
            return
        layout = weight_layout(self.data.device, self.data.dtype)
        assert layout is not None, "it was there when this was made"
        rows = rows.to(self.data.dtype)
        layout.pack_rows(rows if rows.stride(1) == 1 else rows.contiguous(), self.data, first_row)

    def take(self, row_ids: Tensor) -> Tensor:
        """Rows row_ids [n] int64: [n, num_columns]. Raises IndexError for one that does not exist."""
        return gather_rows(self.data, row_ids, self.num_rows, self.num_columns, self.is_packed)

    def linear(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [..., num_columns] times this weight transposed, plus bias [num_rows]: [..., num_rows].

        If it is packed, the sums are fp32 and rounded once to out_dtype (None: x's), and a row of the result has the
        same bits whatever other rows x has. Else they are first rounded to x's dtype. out: where to write the result,
        in its dtype; its rows may lie apart, as in a slice of columns.
        """
        return linear(x, self, bias, out_dtype, out)

    def plain(self) -> Tensor:
        """The weight as [num_rows, num_columns]; a copy if it is packed."""
        return self.take(torch.arange(self.num_rows)) if self.is_packed else self.data
