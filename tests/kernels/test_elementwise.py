"""Sums, gates, products, soft caps, limits and gathered columns: against float64 or a loop, and in a recorded step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import Operation
from pagewick.kernels.cpu.structs import DType, Elementwise, ElementwiseArgs, Status
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import NativeKernels, required_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 3, 15, 16, 17, 63, 65, 1031]
FACTOR = 0.3  # not a float32
CAP = 1.7
XIELU = 0.75, 1.25, 0.5, -(2.0**-20)

OPERATIONS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "add": lambda kernels, x, y: kernels.add(x, y),
    "multiply": lambda kernels, x, y: kernels.multiply(x, y),
    "scale": lambda kernels, x, y: kernels.scale(x, FACTOR),
    "soft_cap": lambda kernels, x, y: kernels.soft_cap(x, CAP),
    "limit": lambda kernels, x, y: kernels.limit(x, CAP),
    "xielu": lambda kernels, x, y: kernels.xielu(x, *XIELU),
    "sigmoid_gate": lambda kernels, x, y: kernels.sigmoid_gate(x, y),
}


def as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def expected(name: str, x: Tensor, y: Tensor) -> Tensor:
    """In float64: what is rounded once to the dtype of x, and to float32 before that."""
    wide, other = x.double(), y.double()
    if name == "add":
        return wide + other
    if name == "sigmoid_gate":
        return wide * torch.sigmoid(other)
    if name == "multiply":
        return wide * other
    if name == "xielu":
        positive, negative, beta, eps = XIELU
        curved = (torch.expm1(wide.clamp(max=eps)) - wide) * negative
        return torch.where(wide > 0, positive * wide**2, curved) + beta * wide
    if name == "soft_cap":
        return as_float32(CAP) * torch.tanh(wide / as_float32(CAP))
    if name == "limit":
        return wide.clamp(-as_float32(CAP), as_float32(CAP))
    return wide * as_float32(FACTOR)


def inputs(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    x, y = 3 * torch.randn(2, *shape, generator=generator)
    return x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_and_size(kernels: Any, name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, y = inputs(3, size, dtype=dtype)
        out = OPERATIONS[name](kernels, x, y)
        assert out.dtype == dtype
        once = expected(name, x, y).float().to(dtype)
        if name == "xielu":
            # The two terms of a number below 0 cancel each other in places.
            relative = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(out, once, rtol=relative, atol=2**-19 * x.abs().max().item())
        elif name in ("soft_cap", "sigmoid_gate"):
            # Half a unit in the last place of the dtype, and 2^-20 of the function.
            relative = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(out, once, rtol=relative, atol=0)
        else:
            assert torch.equal(out, once)


def test_tanh_from_end_to_end(kernels: Any) -> None:
    x = torch.cat((torch.linspace(-13, 13, 20_011), torch.logspace(-30, 2, 3001), -torch.logspace(-30, 2, 3001)))
    for cap in (1.0, 30.0, 0.01):
        out = kernels.soft_cap(x, cap).double()
        exact = as_float32(cap) * torch.tanh(x.double() / as_float32(cap))
        assert ((out - exact).abs() <= 1e-6 * exact.abs()).all()


def test_where_numbers_end(kernels: Any) -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 3e38, -3e38])
    capped = kernels.soft_cap(x, 30.0)
    assert capped[[0, 1, 4, 5]].tolist() == [30.0, -30.0, 30.0, -30.0]
    assert capped[2].isnan()
    assert capped[3].signbit() and capped[3] == 0
    limited = kernels.limit(x, 30.0)
    assert limited[[0, 1, 4, 5]].tolist() == [30.0, -30.0, 30.0, -30.0]
    assert limited[2].isnan() and limited[3].signbit()
    scaled = kernels.scale(x, 2.0)
    assert scaled[[0, 1, 4, 5]].tolist() == [float("inf"), -float("inf"), float("inf"), -float("inf")]
    assert scaled[2].isnan() and scaled[3].signbit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [1000, 65_541])
def test_same_bits_alone_elsewhere_and_threaded(
    native: NativeKernels, name: str, dtype: torch.dtype, size: int
) -> None:
    x, y = inputs(5 if size > 10_000 else 70, size, dtype=dtype)
    run = OPERATIONS[name]
    out = run(native, x, y)
    alone = [run(native, a, b) for a, b in zip(x[:3].split(1), y[:3].split(1), strict=True)]
    assert torch.equal(torch.cat(alone), out[:3])
    # The same numbers at other places of a vector, and at its end.
    assert torch.equal(run(native, x[:3, 5:42], y[:3, 5:42]), out[:3, 5:42])
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(run(native, x, y), out)


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_of_a_wider_matrix_and_more_dimensions(native: NativeKernels, name: str) -> None:
    run = OPERATIONS[name]
    wide_x, wide_y = inputs(5, 100, dtype=torch.bfloat16)
    x, y = wide_x[:, :34], wide_y[:, 50:84]
    flat = run(native, x.contiguous(), y.contiguous())
    assert torch.equal(run(native, x, y), flat)
    assert torch.equal(run(native, x.T, y.T), flat.T)
    deep = run(native, x.reshape(5, 2, 17), y.reshape(5, 2, 17))
    assert deep.shape == (5, 2, 17)
    assert torch.equal(deep.view(5, 34), flat)
    assert torch.equal(run(native, x[0], y[0]), flat[0])


@pytest.mark.parametrize("name", ["add", "multiply"])
def test_one_row_serves_several(kernels: Any, name: str) -> None:
    x, wide = inputs(2, 3, 17, dtype=torch.bfloat16)[0], inputs(2, 1, 20, dtype=torch.bfloat16)[1][..., :17]
    run = OPERATIONS[name]
    for y in (wide, wide[0], wide[1, 0], wide.expand(2, 3, 17)):
        assert torch.equal(run(kernels, x, y), run(reference, x, y.expand(x.shape)))


@pytest.mark.usefixtures("native")
def test_the_result_may_lie_where_an_input_does() -> None:
    """As csrc/elementwise.h promises."""
    x, y = inputs(3, 19, dtype=torch.float32)

    def add_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        args = ElementwiseArgs(
            x=a.data_ptr(), other=b.data_ptr(), out=out.data_ptr(), num_rows=3, size=19, x_stride=19, other_stride=19,
            other_repeat=1, factor=0.0, dtype=DType.FLOAT32, kind=Elementwise.ADD,
        )  # fmt: skip
        assert Operation("elementwise", ElementwiseArgs).run(args) == Status.OK
        return out

    other, again = y.clone(), y.clone()
    assert torch.equal(add_into(other, x, other), x + y)
    assert torch.equal(add_into(again, again, again), y + y)


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"\[3, 8\] and \[3, 7\] do not fit together"):
        native.add(x, x[:, :7])
    deep = torch.ones(2, 3, 8)
    for wrong in (deep[:, :2], deep[0], deep[:, :1, :1], deep[:1], torch.ones(1, 2, 3, 8), torch.ones(2, 2, 3, 8)):
        with pytest.raises(ValueError, match="do not fit together"):
            native.add(deep, wrong)
    with pytest.raises(ValueError, match="no native scale of"):
        native.scale(x.double(), 2.0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_library_serves_what_it_can_and_the_reference_the_rest(native: NativeKernels, name: str) -> None:
    run = OPERATIONS[name]
    x, y = inputs(3, 50, dtype=torch.float32)
    assert torch.equal(run(dispatched, x, y), run(native, x, y))
    assert run(dispatched, x[:0], y[:0]).shape == (0, 50)
    assert torch.equal(run(dispatched, x.double(), y.double()), run(reference, x.double(), y.double()))
    assert torch.equal(dispatched.add(x, y.bfloat16()), x + y.bfloat16())
    learned = x.clone().requires_grad_()
    run(dispatched, learned, y).sum().backward()
    assert learned.grad is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 40_000])
def test_columns_are_gathered(kernels: Any, size: int, dtype: torch.dtype) -> None:
    """More columns than there are, from rows of a wider matrix, NaN and infinities included."""
    wide, _ = inputs(3, size + 5, dtype=dtype)
    wide[1, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    x = wide[:, :size]
    columns = torch.randint(0, size, (size + 9,), generator=torch.Generator().manual_seed(1))
    columns[:2] = torch.tensor([size - 1, 0])
    out = kernels.gather_columns(x, columns)
    assert out.dtype == dtype and out.shape == (3, size + 9)
    for row, gathered in zip(x.float().tolist(), out.float().tolist(), strict=True):
        assert str(gathered) == str([row[column] for column in columns.tolist()])
    assert kernels.gather_columns(x[:0], columns).shape == (0, size + 9)


def test_gathered_columns_are_those_of_any_threads_and_shapes(native: NativeKernels) -> None:
    x, columns = inputs(2, 9, 5000, dtype=torch.bfloat16)[0], torch.randperm(5000)
    out = native.gather_columns(x, columns)
    assert torch.equal(out, x[..., columns]) and out.shape == (2, 9, 5000)
    assert torch.equal(native.gather_columns(x[0, 0], columns), x[0, 0, columns])
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.gather_columns(x, columns), out)
    for outside in (-1, 5000):
        with pytest.raises(IndexError, match=r"a column is outside 0 \.\. 4999"):
            native.gather_columns(x, torch.tensor([0, outside]))
    for wrong in (columns.int(), columns.view(2, -1), columns[::2]):
        with pytest.raises(ValueError, match="columns must be contiguous int64 on the CPU"):
            native.gather_columns(x, wrong)
    assert torch.equal(dispatched.gather_columns(x.double(), columns), x.double()[..., columns])
    learned = x.float().requires_grad_()
    dispatched.gather_columns(learned, columns).sum().backward()
    assert learned.grad is not None and bool((learned.grad == 1).all())


def test_they_can_be_recorded() -> None:
    required_library()
    x, y = inputs(4, 40, dtype=torch.bfloat16)
    positions, columns = torch.tensor([3, 20, 21, 999]), torch.randperm(40)

    def compute() -> list[Tensor]:
        added = dispatched.add(dispatched.scale(x, FACTOR), y)
        capped = dispatched.gather_columns(dispatched.soft_cap(added, CAP), columns)
        return [capped, *dispatched.dynamic_rotary_angles(positions, 1e4, 8, 2.0, 20)]

    results, recorded = record(compute, StepMemory())
    assert isinstance(recorded, RecordedStep), recorded
    x.copy_(inputs(4, 40, dtype=torch.bfloat16)[1])
    positions.add_(17)
    recorded.replay()
    for replayed, fresh in zip(results, compute(), strict=True):
        assert torch.equal(replayed, fresh)
