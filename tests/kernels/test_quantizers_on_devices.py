"""The definition of the quantizers gives the same bits on a GPU as on a CPU, as far as that shows without a GPU.

It may only use operations that IEEE 754 defines to the last bit, and sums of whole numbers. PyTorch's sums of floating
point numbers add in another order on each device, and on a GPU it divides by a number by multiplying with a reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewick.kernels import reference
from pagewick.kernels.reference_quantizers import FORMATS

# Each rounds once, or not at all.
ROUNDED_ONCE = {
    "abs", "add", "add_", "amax", "amin", "clamp", "copysign", "div", "floor", "minimum", "maximum", "mul", "neg",
    "round", "rsub", "sqrt", "sub", "where", "_to_copy", "bitwise_and", "bitwise_left_shift", "bitwise_right_shift",
    "bitwise_or", "__lshift__", "__rshift__", "gt", "lt", "le", "ge", "eq", "ne", "isfinite", "logical_not", "all",
    "any", "logical_and", "scalar_tensor", "floor_divide", "remainder",
}  # fmt: skip
# These move numbers, or make constants.
MOVES = {
    "_reshape_alias", "_unsafe_view", "alias", "arange", "cat", "clone", "copy_", "detach", "empty", "empty_like",
    "expand", "full_like", "gather", "index", "permute", "repeat_interleave", "select", "slice", "split", "squeeze",
    "stack", "t", "transpose", "unbind", "unsqueeze", "view", "zeros_like", "ones_like", "repeat", "full", "zeros",
    "ones", "lift_fresh", "item", "_local_scalar_dense", "unfold", "index_put_", "slice_scatter", "fill_",
}  # fmt: skip
WHOLE = ("sum", "cumsum")


class Recorded(TorchDispatchMode):
    """Notes the faults of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: set[str] = set()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.num_operations += 1
        if name in WHOLE:
            if args[0].is_floating_point():
                self.faults.add(f"{name} of floating point numbers")
        elif name not in ROUNDED_ONCE | MOVES:
            self.faults.add(name)
        if name == "div" and not isinstance(args[1], Tensor) and args[1] not in (2**power for power in range(20)):
            self.faults.add(f"division by the number {args[1]}")
        if name == "div" and isinstance(args[1], Tensor) and args[1].ndim == 0:
            self.faults.add("division by a single number")
        return func(*args, **(kwargs or {}))


def faults_of(work: Callable[[], object]) -> set[str]:
    with Recorded() as recorded:
        work()
    assert recorded.num_operations > 0
    return recorded.faults


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_operation_is_defined_to_the_last_bit(name: str, search: bool) -> None:
    rows = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    assert faults_of(lambda: reference.quantize_weight(rows, name, None, search)) == set()


def test_faults_are_found() -> None:
    x = torch.randn(3, 3)
    assert faults_of(lambda: x / 15) == {"division by the number 15"}
    assert faults_of(lambda: x / x[0, 0]) == {"division by a single number"}
    assert faults_of(lambda: x.sum(0)) == {"sum of floating point numbers"}
    assert faults_of(lambda: x @ x) == {"mm"}
    assert faults_of(lambda: x / 16 + x / torch.full_like(x, 15)) == set()
