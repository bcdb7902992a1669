"""Weights in the layout that products on their device want: Matrix, Experts, PerHeadLinear."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.kernels import TABLE, gather_rows, grouped_linear, linear
from pagewick.kernels.dispatch import WeightLayout
from pagewick.kernels.huge_pages import empty_weight, huge_zeros
from pagewick.kernels.options import StoredExperts, StoredMatrix

# Head ids are kept ready for this many tokens: steps of at most as many can be recorded.
_TOKENS_READY = 64


def weight_layout(device: torch.device | str, dtype: torch.dtype) -> WeightLayout | None:
    """Return how weights of a dtype are to lie on a device; None: [num_rows, num_columns]."""
    backend = TABLE.backend("linear", torch.device(device).type, dtype)
    return None if backend is None else backend.weights


@dataclass(frozen=True, slots=True)
class Matrix(StoredMatrix):
    """A weight of num_rows outputs and num_columns inputs."""

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
        """Return room for a weight. If not is_multiplied, `linear` will not be called: rows stay as they are."""
        layout = weight_layout(device, dtype) if is_multiplied else None
        if layout is None:
            return cls(empty_weight((num_rows, num_columns), dtype, device), num_rows, num_columns, False)
        shape = layout.packed_shape(num_rows, num_columns, dtype)
        return cls(huge_zeros(shape, dtype), num_rows, num_columns, True)

    def load(self, rows: Tensor, first_row: int) -> None:
        """Store `rows` [n, num_columns] as the rows from `first_row` on, in this weight's dtype.

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
        """Return rows row_ids [n] int64: [n, num_columns]. Raises IndexError for a row that does not exist."""
        return gather_rows(self.data, row_ids, self.num_rows, self.num_columns, self.is_packed)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return x [..., num_columns] times this weight transposed, plus bias [num_rows]: [..., num_rows].

        If the weight is packed, sums are fp32 and rounded once to out_dtype (None: x's), and a row of the result has
        the same bits whatever other rows x has. Else sums are first rounded to x's dtype. out: a tensor to write the
        result to, in its dtype; its rows may lie apart, as in a slice of columns.
        """
        return linear(x, self, bias, out_dtype, out)

    def plain(self) -> Tensor:
        """Return the weight as [num_rows, num_columns]; a copy if it is packed."""
        return self.take(torch.arange(self.num_rows)) if self.is_packed else self.data


@dataclass(frozen=True, slots=True)
class Experts(StoredExperts):
    """The weights of num_experts experts, each of num_rows outputs and num_columns inputs, in one piece of memory."""

    @classmethod
    def empty(
        cls, num_experts: int, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Experts:
        """Return room for weights, packed where products on this device want that."""
        shape = (num_experts, num_rows, num_columns)
        layout = None if 0 in shape else weight_layout(device, dtype)
        if layout is None:
            return cls(empty_weight(shape, dtype, device), *shape, False)
        packed = (num_experts, *layout.packed_shape(num_rows, num_columns, dtype))
        return cls(huge_zeros(packed, dtype), *shape, True)

    def matrix(self, expert: int) -> Matrix:
        """Return the weight of one expert, in the same memory."""
        return self.matrix_in(self.data[expert])

    def matrix_in(self, data: Tensor) -> Matrix:
        """Return the weight of one expert that lies in `data`, in the layout of these."""
        return Matrix(data, self.num_rows, self.num_columns, self.is_packed)

    def load(self, expert: int, rows: Tensor, first_row: int) -> None:
        """Store `rows` [n, num_columns] as the rows of an expert from `first_row` on, in this weight's dtype.

        Raises ValueError if they do not fit, or if there is no such expert.
        """
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"there is no expert {expert} among {self.num_experts}")
        self.matrix(expert).load(rows, first_row)

    def linear(self, x: Tensor, expert_ids: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return the product of each choice with its expert's weight, plus bias [E, num_rows]: [T * A, num_rows].

        x: [T, num_columns], or [T * A, num_columns] with a row for each choice; expert_ids: [T, A] int32. See
        reference_moe.grouped_linear. If the weights are packed, a row has the bits that `matrix(expert).linear` gives
        it. out: a tensor to write the result to; its rows may lie apart. Raises IndexError for an id outside
        0 .. num_experts - 1.
        """
        return grouped_linear(x, self, expert_ids, bias, out)


class PerHeadLinear:
    """A product of each head with a matrix of its own, [num_rows, num_columns] for each of num_heads heads.

    Multi-head latent attention (reference_mla.py) turns heads into latents and back with two of these. weights: the
    matrices, as experts; fill them by `weights.load(head, rows, first_row)`.
    """

    def __init__(
        self, num_heads: int, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.weights = Experts.empty(num_heads, num_rows, num_columns, dtype, device)
        self._head_ids = torch.arange(num_heads, dtype=torch.int32, device=device).repeat(_TOKENS_READY, 1)

    def linear(self, x: Tensor) -> Tensor:
        """Return x [T, H, num_columns] times each head's matrix transposed: [T, H, num_rows] in x.dtype.

        On a CPU with the native library a row has the same bits whatever other rows x has.
        """
        num_tokens, num_heads, _ = x.shape
        head_ids = self._head_ids[:num_tokens]
        if num_tokens > len(head_ids):
            head_ids = self._head_ids[:1].repeat(num_tokens, 1)
        return self.weights.linear(x.flatten(0, 1), head_ids).view(num_tokens, num_heads, self.weights.num_rows)
