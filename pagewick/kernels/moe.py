"""Mixtures of experts: weights of many experts, and the products with those that a token goes to.

`route` chooses experts, `Experts.linear` multiplies with them, `combine` sums up; `fused_moe` is the whole layer in one
operation. reference_moe.py says what each of them is. Dimensions as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.expert_routing import Routing
from pagewick.kernels import cpu, reference
from pagewick.kernels.cpu import matrix as native_matrix
from pagewick.kernels.cpu import moe as native_moe
from pagewick.kernels.cpu.binding import DTYPES, NativeLibrary
from pagewick.kernels.huge_pages import empty_weight, huge_zeros
from pagewick.kernels.matrix import Matrix


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of num_experts experts, each of num_rows outputs and num_columns inputs, in one piece of memory.

    data: [num_experts, num_rows, num_columns], or num_experts times what pagewick.kernels.cpu.matrix.packed_shape says
    if is_packed.
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
        """Room for weights; packed where the native library multiplies them."""
        shape = (num_experts, num_rows, num_columns)
        if torch.device(device).type != "cpu" or not cpu.library() or dtype not in DTYPES or 0 in shape:
            return cls(empty_weight(shape, dtype, device), *shape, False)
        packed = (num_experts, *native_matrix.packed_shape(num_rows, num_columns, dtype))
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
        if self.is_packed:
            return native_moe.grouped_linear(_required(), x, self.data, expert_ids, self.num_rows, bias)
        return reference.grouped_linear(x, self.data, expert_ids, bias)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Expert ids [T, A] int32, the best first, and their weights [T, A] float32, for logits [T, E] float32.

    bias: [E] float32, added to the scores for the choice only. See reference_moe.route. Raises ValueError where
    `routing` does not fit so many experts.
    """
    if logits.is_cpu and (native := cpu.library()) and native_moe.has_route(logits):
        return native_moe.route(native, logits, routing, bias)
    return reference.route(logits, routing, bias)


def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None, shared_gate: Tensor | None = None) -> Tensor:
    """The sum of y [T * A, N] over the choices of a token, times weights [T, A] float32: [T, N], rounded once.

    shared [T, N] is added last, times the sigmoid of shared_gate [T] float32 if there is one.
    See reference_moe.combine.
    """
    if y.is_cpu and (native := cpu.library()) and native_moe.has_combine(y):
        return native_moe.combine(native, y, weights, shared, shared_gate)
    return reference.combine(y, weights, shared, shared_gate)


def fused_moe(
    x: Tensor,
    logits: Tensor,
    gate_up: Experts,
    down: Experts,
    routing: Routing,
    *,
    activation: str = "silu",
    router_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """A layer's experts for x [T, H] and router logits [T, E] float32: [T, H] in x.dtype.

    The same, to the last bit, as `route`, `gate_up.linear`, the gated activation (or the plain one, if gate_up has as
    many rows as down has columns), `down.linear` and `combine`, one after the other. A token's result has the same bits
    whatever other tokens are there. Raises ValueError for what does not fit together.
    """
    is_gated = gate_up.num_rows == 2 * down.num_columns
    if gate_up.is_packed != down.is_packed or (not is_gated and gate_up.num_rows != down.num_columns):
        raise ValueError(f"{gate_up.num_rows} outputs of the first products do not fit {down.num_columns} inputs")
    if gate_up.is_packed:
        return native_moe.fused_moe(
            _required(), x, logits, gate_up.data, down.data, routing,
            intermediate_size=down.num_columns, activation=activation, is_gated=is_gated, router_bias=router_bias,
            gate_up_bias=gate_up_bias, down_bias=down_bias, shared=shared, shared_gate=shared_gate,
        )  # fmt: skip
    expert_ids, weights = route(logits, routing, router_bias)
    function = reference.gated_activation if is_gated else reference.activation
    activated = function(gate_up.linear(x, expert_ids, gate_up_bias), activation)
    return combine(down.linear(activated, expert_ids, down_bias), weights, shared, shared_gate)


def _required() -> NativeLibrary:
    native = cpu.library()
    assert native is not None, "it was there when the weights were made"
    return native
