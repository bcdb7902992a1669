"""Experts: the weights of a mixture of experts, in the layout that products on their device want."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.kernels.huge_pages import empty_weight, huge_zeros
from pagewick.kernels.matrix import Matrix, weight_layout
from pagewick.kernels.operations import grouped_linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of num_experts experts, each of num_rows outputs and num_columns inputs, in one piece of memory.

    data: [num_experts, num_rows, num_columns], or num_experts packed weights as matrix.weight_layout says.
    """

    data: Tensor
    num_experts: int
    num_rows: int
    num_columns: int
    is_packed: bool

    @classmethod
    def empty(
        cls, num_experts: int, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Experts:
        """Room for weights; packed where products on this device want that."""
        shape = (num_experts, num_rows, num_columns)
        layout = None if 0 in shape else weight_layout(device, dtype)
        if layout is None:
            return cls(empty_weight(shape, dtype, device), *shape, False)
        packed = (num_experts, *layout.packed_shape(num_rows, num_columns, dtype))
        return cls(huge_zeros(packed, dtype), *shape, True)

    def matrix(self, expert: int) -> Matrix:
        """The weight of one expert, in the same memory."""
        return Matrix(self.data[expert], self.num_rows, self.num_columns, self.is_packed)

    def load(self, expert: int, rows: Tensor, first_row: int) -> None:
        """Put `rows` [n, num_columns] of an expert in their place, from `first_row` on, in this weight's dtype.

        Raises ValueError if they do not fit, or if there is no such expert.
        """
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"there is no expert {expert} among {self.num_experts}")
        self.matrix(expert).load(rows, first_row)

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of each choice with its expert's weight, plus bias [E, num_rows]: [T * A, num_rows].

        x: [T, num_columns], or [T * A, num_columns] with a row for each choice; expert_ids: [T, A] int32. See
        reference_moe.grouped_linear. If it is packed, a row has the bits that `matrix(expert).linear` gives it. Raises
        IndexError for an id outside 0 .. num_experts - 1.
        """
        return grouped_linear(x, self, expert_ids, bias)
