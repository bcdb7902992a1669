"""The operations around matrix products give a row the same bits in any batch; test_exactness relies on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.sampling.sampler import score_tokens
from pagewick.kernels.options import Rotation
from pagewick.kernels.reference_rope import turn_heads
from tests.engine.row_by_row import linear

NUM_ROWS = 40
# Multiples of no vector's width among them.
WIDTHS = (8, 24, 48, 72, 90, 193, 258)


def assert_rows_alone(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The operation on rows first..last gives each what it gives it alone."""
    alone = [operation(x[index : index + 1].clone()) for index in range(len(x))]
    for first, last in ((0, 2), (1, 4), (3, 8), (0, 17), (5, 38), (0, NUM_ROWS)):
        together = operation(x[first:last].clone())
        for index in range(first, last):
            assert torch.equal(together[index - first : index - first + 1], alone[index]), (first, last, index)


def rows(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_products(width: int, dtype: torch.dtype) -> None:
    for num_out in (48, 193):
        weight = torch.randn(num_out, width, generator=torch.Generator().manual_seed(num_out)).to(dtype)
        assert_rows_alone(lambda x, weight=weight: linear(x, weight, weight[:, 0]), rows(width, dtype))
        expected = rows(width, dtype).double() @ weight.double().T + weight[:, 0].double()
        tolerance = 1e-4 if dtype == torch.float32 else 0.5
        torch.testing.assert_close(
            linear(rows(width, dtype), weight, weight[:, 0]).double(), expected, atol=tolerance, rtol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype) -> None:
    weight = rows(width, dtype)[0]
    assert_rows_alone(lambda x: kernels.rms_norm(x, weight, 1e-6), rows(width, dtype))
    assert_rows_alone(lambda x: torch.cat(kernels.add_rms_norm(x, x * 0.3, weight, 1e-6), dim=1), rows(width, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [width for width in WIDTHS if width % 2 == 0])
def test_activations(width: int, dtype: torch.dtype) -> None:
    assert_rows_alone(lambda x: kernels.gated_activation(x, "silu"), rows(width, dtype))


@pytest.mark.parametrize("half", [3, 4, 8, 12, 20, 40])
def test_rotations(half: int) -> None:
    def rotated(x: Tensor) -> Tensor:
        angles = x[:, :half] * 300
        heads = x[:, half:].reshape(len(x), 3, 2 * half)
        return turn_heads(heads, None, Rotation(angles.cos(), angles.sin())).flatten(1)

    assert_rows_alone(rotated, rows(7 * half))


@pytest.mark.parametrize("width", WIDTHS)
def test_log_probabilities(width: int) -> None:
    def numbers(x: Tensor) -> Tensor:
        found = score_tokens(x, x.argmin(dim=-1), 5).to_list()
        return torch.tensor([[each.logprob, each.rank, *(v for pair in each.top for v in pair)] for each in found])

    assert_rows_alone(numbers, rows(width))
