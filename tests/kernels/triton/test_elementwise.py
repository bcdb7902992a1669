"""Activations, products with a factor and soft caps in Triton against their definitions, interpreted."""

from __future__ import annotations

import math

import pytest
import torch

from pagewick.kernels import reference
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers

elementwise = pytest.importorskip("pagewick.kernels.triton.elementwise")
# The interpreter computes like NumPy, which warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", reference.ACTIVATIONS)
def test_activations(kind: str, dtype: torch.dtype) -> None:
    x = (4 * numbers(3, 1030)).to(dtype)
    x[0, :8] = torch.tensor([0.0, -0.0, 1e-3, -0.1249, 0.1251, 30, -30, 6e4]).to(dtype)
    x[1, :2] = torch.tensor([float("nan"), -200.0])
    assert_near(elementwise.activation(x, kind), reference.activation(x, kind))
    assert_near(elementwise.gated_activation(x, kind), reference.gated_activation(x, kind), 1e-5)


def test_the_tail_of_gelu_keeps_its_digits() -> None:
    x = torch.linspace(-6, -3, 50)
    u = math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3)
    expected = x.double() * torch.sigmoid(2 * u)
    torch.testing.assert_close(elementwise.activation(x, "gelu_tanh"), expected.float(), rtol=1e-5, atol=0)
    assert elementwise.activation(torch.tensor([-200.0, -30.0]), "gelu_tanh").tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_soft_cap_and_limit(dtype: torch.dtype) -> None:
    x = (40 * numbers(2, 3, 65)).to(dtype)[..., :63]
    assert_near(elementwise.scale(x, 0.3), reference.scale(x, 0.3))
    assert_near(elementwise.soft_cap(x, 30.0), reference.soft_cap(x, 30.0), 4e-6)
    assert torch.equal(elementwise.limit(x, 30.0), reference.limit(x, 30.0))
    # Near 0 no digits are lost.
    small = numbers(1, 64) * 1e-3
    torch.testing.assert_close(elementwise.soft_cap(small, 1.0), reference.soft_cap(small, 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate(dtype: torch.dtype) -> None:
    both = (4 * numbers(3, 2060)).to(dtype)
    both[0, 1030:1034] = torch.tensor([0.0, 200.0, -200.0, float("nan")]).to(dtype)
    x, gate = both[:, :1030], both[:, 1030:]
    assert_near(elementwise.sigmoid_gate(x, gate), reference.sigmoid_gate(x, gate), 1e-5)


def test_other_calls_pass_to_the_definition() -> None:
    x = numbers(2, 6).double()
    assert torch.equal(elementwise.gated_activation(x, "silu"), reference.gated_activation(x, "silu"))
    assert elementwise.scale(x.float()[:0], 2.0).shape == (0, 6)
