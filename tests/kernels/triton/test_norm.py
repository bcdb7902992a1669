"""Norms in Triton against their definitions, interpreted."""

from __future__ import annotations

import pytest
import torch

from pagewick.kernels import reference
from tests.deep import IS_DEEP
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers

norm = pytest.importorskip("pagewick.kernels.triton.norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 63), (3, 513), *([(1, 5120), (2, 16384)] if IS_DEEP else [])])
def test_norms_are_their_definitions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = numbers(2, *shape).mul(3).add(0.5).to(dtype)
    weight, bias = numbers(2, shape[-1], seed=1).to(dtype)
    for offset in (0.0, 1.0):
        assert_near(norm.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset), 1e-5)
        found = norm.add_rms_norm(x, residual, weight, 1e-5, offset)
        for one, other in zip(found, reference.add_rms_norm(x, residual, weight, 1e-5, offset), strict=True):
            assert_near(one, other, 4e-2 if dtype == torch.bfloat16 else 1e-5)
    for shift in (None, bias):
        expected = reference.add_layer_norm(x, residual, weight, shift, 1e-2)
        found = norm.add_layer_norm(x, residual, weight, shift, 1e-2)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, 8e-2 if dtype == torch.bfloat16 else 1e-5)
        assert_near(norm.layer_norm(x, weight, shift, 1e-2), reference.layer_norm(x, weight, shift, 1e-2), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_residual_in_float32_stays_so(dtype: torch.dtype) -> None:
    x, weight = numbers(3, 65).to(dtype), numbers(65, seed=1).to(dtype)
    for residual in (torch.zeros(1, 65).expand(3, -1), numbers(3, 65, seed=2)):
        out, total = norm.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x.float() + residual)
        assert_near(
            out, reference.add_rms_norm(x, residual, weight, 1e-5)[0], 4e-2 if dtype == torch.bfloat16 else 1e-5
        )


def test_rows_of_a_wider_matrix_have_the_bits_that_they_have_alone() -> None:
    wide, weight = numbers(5, 130), numbers(65, seed=1)
    found = norm.rms_norm(wide[:, :65], weight, 1e-6)
    for row in range(5):
        assert torch.equal(norm.rms_norm(wide[row : row + 1, :65].clone(), weight, 1e-6)[0], found[row])


def test_other_calls_pass_to_the_definition() -> None:
    x, weight = numbers(2, 20), numbers(20, seed=1)
    assert torch.equal(norm.rms_norm(x, weight.double(), 1e-6), reference.rms_norm(x, weight.double(), 1e-6))
    long = numbers(1, norm.BLOCKS[-1] + 1)
    assert torch.equal(norm.rms_norm(long, long[0], 1e-6), reference.rms_norm(long, long[0], 1e-6))
    assert norm.rms_norm(x[:0], weight, 1e-6).shape == (0, 20)
