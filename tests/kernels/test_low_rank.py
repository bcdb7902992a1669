"""Adapters of linear layers against their definition in float64, and bit for bit against rows by themselves."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels import reference
from pagewick.kernels.matrix import Experts
from pagewick.kernels.options import StoredExperts
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import NativeKernels, required_library
from tests.kernels.test_moe import DTYPES, ROUNDING, loaded, plain, random

Kernels = ModuleType | NativeKernels
# adapters (the last one stands for none), tokens, inputs, rank, outputs
SHAPES = [
    (1, 3, 8, 16, 8),
    (2, 1, 1, 16, 1),
    (3, 7, 33, 16, 65),
    (4, 130, 97, 48, 130),
    (9, 40, 64, 5, 257),
]


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, x, A, B and ids; some adapters have far more rows than others."""
    num_adapters, num_tokens, inputs, rank, outputs = shape
    down, up = random(num_adapters, rank, inputs, dtype=dtype), random(num_adapters, outputs, rank, dtype=dtype)
    down[-1] = up[-1] = 0
    ids = (torch.rand(num_tokens, generator=torch.Generator().manual_seed(3)) ** 2 * num_adapters).int()
    ids[0] = 0
    if num_adapters == 9:
        ids = ids.sort().values
    return random(num_tokens, outputs, dtype=dtype, seed=1), random(num_tokens, inputs, dtype=dtype), down, up, ids


def stored(kernels: Kernels, weight: Tensor) -> StoredExperts:
    return plain(weight) if kernels is reference else loaded(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_changes_of_rows(kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    y, x, down, up, ids = case(shape, dtype)
    kept = y.clone()
    found = kernels.add_low_rank(y, x, stored(kernels, down), stored(kernels, up), ids)
    inner = torch.einsum("tk,trk->tr", x.double(), down.double()[ids.long()])
    change = torch.einsum("tr,tnr->tn", inner, up.double()[ids.long()])
    expected = kept.double() + change
    # Two products of factors of about this size are rounded, and then the sum.
    step = ROUNDING[dtype]
    scale = torch.einsum("tr,tnr->tn", inner.abs(), up.double().abs()[ids.long()])
    limit = 3 * step * (scale + expected.abs() + kept.abs()) + 1e-6 * scale.max()
    assert ((found.double() - expected).abs() <= limit).all()
    is_none = ids == shape[0] - 1
    assert torch.equal(found[is_none], kept[is_none])
    if (~is_none).any():
        assert not torch.equal(found[~is_none], kept[~is_none])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_its_own(native: NativeKernels, dtype: torch.dtype) -> None:
    """Whatever other rows there are, in rows of a wider tensor, and with any number of threads."""
    for shape in SHAPES:
        y, x, down, up, ids = case(shape, dtype)
        factors = loaded(down), loaded(up)
        expected = native.add_low_rank(y.clone(), x, *factors, ids)
        for token in range(0, len(x), 5):
            one = slice(token, token + 1)
            assert torch.equal(native.add_low_rank(y[one].clone(), x[one], *factors, ids[one]), expected[one])
        for count in (2, 3):
            native.set_num_threads(count)
            wide_y, wide_x = (torch.cat([one, one], dim=1)[:, one.shape[1] :] for one in (y, x))
            assert torch.equal(native.add_low_rank(wide_y, wide_x, *factors, ids), expected)
        native.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_single_products(native: NativeKernels, dtype: torch.dtype) -> None:
    y, x, down, up, ids = case((4, 60, 97, 48, 130), dtype)
    factors: tuple[Experts, Experts] = loaded(down), loaded(up)
    found = native.add_low_rank(y.clone(), x, *factors, ids)
    for token, adapter in enumerate(ids.tolist()):
        change = factors[1].matrix(adapter).linear(factors[0].matrix(adapter).linear(x[token]))
        assert torch.equal(found[token], y[token] + change), token


def test_other_adapters_than_when_it_was_recorded() -> None:
    required_library()
    y, x, down, up, ids = case((3, 7, 33, 16, 65), torch.float32)
    factors = loaded(down), loaded(up)
    (found,), step = record(lambda: [dispatched.add_low_rank(y, x, *factors, ids)], StepMemory())
    assert isinstance(step, RecordedStep)
    for adapters in ([0, 1, 2, 2, 1, 0, 0], [2] * 7, [1] * 7):
        ids[:] = torch.tensor(adapters)
        expected = reference.add_low_rank(y, x, plain(down), plain(up), ids)
        step.replay()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_ids_that_no_adapter_has(wrong: int, native: NativeKernels) -> None:
    y, x, down, up, ids = case((3, 7, 33, 16, 65), torch.float32)
    ids[4] = wrong
    with pytest.raises(IndexError, match=r"an adapter id is outside 0 \.\. 2"):
        native.add_low_rank(y, x, loaded(down), loaded(up), ids)


def test_factors_that_do_not_fit(kernels: Kernels) -> None:
    y, x, down, up, ids = case((3, 7, 33, 16, 65), torch.float32)
    first, second = stored(kernels, down), stored(kernels, up)
    for wrong in ((y[:6], x, first, second, ids), (y, x[:6], first, second, ids)):
        with pytest.raises(ValueError):
            kernels.add_low_rank(*wrong)
    with pytest.raises(ValueError):
        kernels.add_low_rank(y, x, first, stored(kernels, up[:2]), ids)
