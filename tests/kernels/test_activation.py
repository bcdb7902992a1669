"""Activation functions against float64, bit for bit against themselves, and where numbers end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels import reference
from pagewick.kernels.cpu.elementwise import ACTIVATION_KINDS
from tests.kernels.conftest import NativeKernels

KINDS = list(ACTIVATION_KINDS)
# These kinds limit the result of the gate, and the numbers that it multiplies, to this magnitude.
BOUNDS = {"silu_within4": 4.0, "silu_within5": 5.0, "silu_within7": 7.0, "silu_within16": 16.0}
# These limit the gate, and the numbers that it multiplies.
INPUT_BOUNDS = {"clamped_silu10": 10.0}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 15, 16, 17, 63, 65, 1031]
# Half a unit in the last place is the rounding; float32 has the errors of the functions as well.
RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def exact(kind: str, x: float) -> float:
    """The function in float64, from the standard library."""
    if kind == "silu":
        return x / (1 + math.exp(-x))
    if kind == "gelu":
        return x * math.erfc(-x / math.sqrt(2)) / 2
    if kind == "gelu_tanh":
        return x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "quick_gelu":
        return x / (1 + math.exp(-1.702 * x))
    if kind == "clamped_swish":
        return min(x, 7.0) / (1 + math.exp(-1.702 * min(x, 7.0)))
    if kind in INPUT_BOUNDS:
        return exact("silu", min(x, INPUT_BOUNDS[kind]))
    if kind == "softplus":
        return max(0.0, x) + math.log1p(math.exp(-abs(x)))
    if kind in BOUNDS:
        return min(x / (1 + math.exp(-x)), BOUNDS[kind])
    return max(0.0, x) ** (2 if kind == "relu2" else 1)


def exact_values(kind: str, x: Tensor) -> Tensor:
    values = [exact(kind, value) for value in x.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


def exact_factor(kind: str, up: Tensor) -> Tensor:
    """Return the factor by which the gated activation multiplies the gate."""
    if bound := (BOUNDS | INPUT_BOUNDS).get(kind):
        return up.double().clamp(-bound, bound)
    return up.double().clamp(-7, 7) + 1 if kind == "clamped_swish" else up.double()


def random_input(*shape: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_size(native: NativeKernels, kind: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x = random_input(3, 2 * size, dtype=dtype)
        expected = exact_values(kind, x)
        tolerance = {"rtol": RELATIVE[dtype], "atol": 1e-7}
        torch.testing.assert_close(native.activation(x, kind).double(), expected, **tolerance)
        gated = native.gated_activation(x, kind)
        assert gated.dtype == dtype
        torch.testing.assert_close(gated.double(), expected[:, :size] * exact_factor(kind, x[:, size:]), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference(kind: str, dtype: torch.dtype) -> None:
    x = random_input(5, 34, dtype=dtype)
    # PyTorch's 1 + erf(x) loses the digits of small results.
    tolerance = {"rtol": RELATIVE[dtype], "atol": 2e-6}
    torch.testing.assert_close(reference.activation(x, kind).double(), exact_values(kind, x), **tolerance)
    gated = exact_values(kind, x[:, :17]) * exact_factor(kind, x[:, 17:])
    torch.testing.assert_close(reference.gated_activation(x, kind).double(), gated, **tolerance)


def test_gelu_from_end_to_end(native: NativeKernels) -> None:
    x = torch.linspace(-13, 13, 20_011)
    error = native.activation(x, "gelu").double() - exact_values("gelu", x)
    assert error.abs().max() < 2e-6
    tail = x[(x < -1) & (x > -12)]
    relative = native.activation(tail, "gelu").double() / exact_values("gelu", tail) - 1
    assert relative.abs().max() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_where_numbers_end(native: NativeKernels, kind: str) -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30, -1e5, -3e38, 1e15, float("inf"), float("nan")])
    out = native.activation(x, kind)
    torch.testing.assert_close(out[:7], reference.activation(x, kind)[:7], rtol=1e-6, atol=1e-36)
    is_bounded = kind == "clamped_swish" or kind in BOUNDS | INPUT_BOUNDS
    assert out[7] == (reference.activation(x[7:8], kind)[0] if is_bounded else float("inf"))
    assert out[8].isnan()


def test_rows_of_a_wider_matrix_and_more_dimensions(native: NativeKernels) -> None:
    wide = random_input(5, 100, dtype=torch.bfloat16)
    assert torch.equal(
        native.gated_activation(wide[:, :34], "silu"),
        native.gated_activation(wide[:, :34].contiguous(), "silu"),
    )
    x = random_input(2, 3, 4, 10, dtype=torch.float32)
    out = native.gated_activation(x, "gelu")
    assert out.shape == (2, 3, 4, 5)
    assert torch.equal(out.view(-1, 5), native.gated_activation(x.view(-1, 10), "gelu"))


@pytest.mark.parametrize("size", [1000, 40_009])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_same_bits_alone_batched_and_threaded(native: NativeKernels, kind: str, size: int) -> None:
    x = random_input(37, 2 * size, dtype=torch.bfloat16)
    out = native.gated_activation(x, kind)
    alone = [native.gated_activation(row, kind) for row in x[:5].split(1)]
    assert torch.equal(torch.cat(alone), out[:5])
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.gated_activation(x, kind), out)


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match="no two halves"):
        native.gated_activation(x[:, :7], "silu")
    with pytest.raises(ValueError, match="no native activation"):
        native.activation(x.double(), "silu")


def test_empty_and_other_dtypes_are_the_references(native: NativeKernels) -> None:
    assert kernels.gated_activation(torch.empty(0, 8), "silu").shape == (0, 4)
    x = random_input(3, 8, dtype=torch.float64)
    assert torch.equal(kernels.gated_activation(x, "gelu"), reference.gated_activation(x, "gelu"))
