"""Parallel residual streams and sparse gates: against float64, bit for bit against themselves, and recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels import batch_invariance, reference
from pagewick.kernels.cpu.structs import MAX_STREAMS
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.kernels.conftest import NativeKernels, required_library

# One rounding of the dtype, and of float32 within sums.
RELATIVE = {torch.float32: 2**-20, torch.bfloat16: 2**-8 + 2**-20, torch.float16: 2**-11 + 2**-20}
DTYPES = list(RELATIVE)
SIZES = [1, 3, 16, 17, 63, 1031]
LEAST = 1e-5


def streams(num_tokens: int, num_others: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a wider matrix, other streams, and rows that a layer computed."""
    generator = torch.Generator().manual_seed(size)
    active, computed = 3 * torch.randn(2, num_tokens, size + 5, generator=generator)
    others = 2 * torch.randn(num_tokens, num_others, size, generator=generator)
    return active.to(dtype)[:, :size], others.to(dtype), computed.to(dtype)[:, 5:]


def coefficients(num_tokens: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, count, generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_near(found: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """magnitude: the sum of the magnitudes of the summed numbers."""
    assert found.shape == expected.shape
    error = (found.double() - expected).abs()
    assert (error <= RELATIVE[found.dtype] * expected.abs() + 2**-22 * magnitude).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_others", [1, 3, MAX_STREAMS - 1, MAX_STREAMS])
def test_streams_are_mixed(kernels: Any, num_others: int, dtype: torch.dtype) -> None:
    """More streams than the library takes go to the definition."""
    for size in SIZES:
        active, others, _ = streams(3, num_others, size, dtype)
        factors = coefficients(3, (1 + num_others) ** 2, dtype)
        before = torch.cat((active.unsqueeze(1), others), 1).double()
        weights = factors.double().view(3, 1 + num_others, 1 + num_others)
        expected = before + torch.einsum("tji,tih->tjh", weights, before)
        first, rest = kernels.mix_streams(active, others, factors)
        magnitude = before.abs() + torch.einsum("tji,tih->tjh", weights.abs(), before.abs())
        assert first.dtype == rest.dtype == dtype
        assert_near(first, expected[:, 0], magnitude[:, 0])
        assert_near(rest, expected[:, 1:], magnitude[:, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_others", [1, 3, MAX_STREAMS - 1, MAX_STREAMS])
def test_streams_are_corrected(kernels: Any, num_others: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        active, others, computed = streams(3, num_others, size, dtype)
        factors = coefficients(3, 1 + num_others, dtype)
        before = torch.cat((active.unsqueeze(1), others), 1).double()
        weights = 1 + factors.double().unsqueeze(-1)
        expected = before + weights * (computed.double().unsqueeze(1) - before[:, :1])
        first, rest = kernels.correct_streams(active, others, computed, factors)
        magnitude = before.abs() + weights.abs() * (computed.double().abs().unsqueeze(1) + before[:, :1].abs())
        assert_near(first, expected[:, 0], magnitude[:, 0])
        assert_near(rest, expected[:, 1:], magnitude[:, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_others", [1, 3])
def test_rows_get_the_magnitude_of_others(kernels: Any, num_others: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        target, x, _ = streams(4, num_others, size, dtype)
        x[1] *= 1e-4  # below the least
        x[2, 0] = 0.0
        own = x.double().square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
        expected = x.double() / own * target.double().square().mean(-1).sqrt().view(4, 1, 1)
        found = kernels.match_magnitude(x, target, LEAST)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=4 * RELATIVE[dtype], atol=1e-7)
        assert torch.equal(kernels.match_magnitude(x[:, 0], target, LEAST), found[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [-0.25, 1.6448536])
def test_the_largest_gates_stay(kernels: Any, factor: float, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, _, _ = streams(3, 1, size, dtype)
        wide = x.double()
        cutoff = wide.mean(-1, keepdim=True) + factor * wide.std(-1, correction=0, keepdim=True)
        found = kernels.gaussian_top_k(x, factor)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), torch.relu(wide - cutoff), rtol=RELATIVE[dtype], atol=4e-6)
        if size == SIZES[-1] and factor > 0:
            assert 0.03 < (found > 0).double().mean() < 0.07


def test_what_is_not_a_number_stays_in_its_row(kernels: Any) -> None:
    x, others, computed = streams(3, 2, 17, torch.float32)
    x[1, 3] = float("nan")
    factors = coefficients(3, 9, torch.float32)
    for found in (
        kernels.gaussian_top_k(x, 0.5),
        kernels.match_magnitude(x, computed, LEAST),
        kernels.match_magnitude(computed, x, LEAST),
        kernels.mix_streams(x, others, factors)[1][:, :, 3],
        kernels.correct_streams(x, others, computed, factors[:, :3])[0][:, 3:4],
    ):
        assert found[1].isnan().all() and not found[[0, 2]].isnan().any()


def inputs_of(num_tokens: int, num_others: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """The arguments of `compute`."""
    counts = (1 + num_others) ** 2, 1 + num_others
    factors = [coefficients(num_tokens, count, dtype) for count in counts]
    return [*streams(num_tokens, num_others, size, dtype), *factors]


def compute(
    kernels: Any, active: Tensor, others: Tensor, computed: Tensor, predictions: Tensor, corrections: Tensor
) -> list[Tensor]:
    """Every operation."""
    mixed = kernels.mix_streams(active, others, predictions)
    corrected = kernels.correct_streams(*mixed, computed, corrections)
    return [*mixed, *corrected, kernels.match_magnitude(others, active, LEAST), kernels.gaussian_top_k(active, 0.7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_and_threaded(native: NativeKernels, dtype: torch.dtype) -> None:
    inputs = inputs_of(41, 3, 1000, dtype)
    found = compute(native, *inputs)
    for row in (0, 17, 40):
        alone = compute(native, *(one[row : row + 1] for one in inputs))
        assert all(torch.equal(one[0], whole[row]) for one, whole in zip(alone, found, strict=True))
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        again = compute(native, *inputs)
        assert all(torch.equal(one, whole) for one, whole in zip(again, found, strict=True))


def test_the_definitions_if_no_sum_may_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(7, 3, 1001, torch.float32)
    usual = compute(reference, *inputs)
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    found = compute(reference, *inputs)
    for one, other in zip(found, usual, strict=True):
        torch.testing.assert_close(one, other)
    alone = compute(reference, *(one[3:4] for one in inputs))
    assert all(torch.equal(one[0], whole[3]) for one, whole in zip(alone, found, strict=True))


def test_the_library_serves_what_it_can_and_the_reference_the_rest(native: NativeKernels) -> None:
    inputs = inputs_of(3, 2, 50, torch.float32)
    for one, other in zip(compute(dispatched, *inputs), compute(native, *inputs), strict=True):
        assert torch.equal(one, other)
    wide = [one.double() for one in inputs]
    for one, other in zip(compute(dispatched, *wide), compute(reference, *wide), strict=True):
        assert torch.equal(one, other)
    assert [len(one) for one in compute(dispatched, *(one[:0] for one in inputs))] == [0] * 6


def test_what_does_not_fit_is_refused(native: NativeKernels) -> None:
    active, others, computed = streams(3, 2, 8, torch.float32)
    factors = coefficients(3, 9, torch.float32)
    with pytest.raises(ValueError, match=r"active \[3, 8\], others \[2, 2, 8\] and coefficients \[3, 9\] do not fit"):
        native.mix_streams(active, others[:2], factors)
    with pytest.raises(ValueError, match="do not fit together"):
        native.mix_streams(active, others, factors[:, :4])
    with pytest.raises(ValueError, match="differ in shape"):
        native.correct_streams(active, others, computed[:, :7], factors[:, :3])
    with pytest.raises(ValueError, match="do not fit together"):
        native.match_magnitude(others, active[:, :7], LEAST)
    with pytest.raises(ValueError, match="no native"):
        native.gaussian_top_k(active.double(), 0.5)


def test_they_can_be_recorded() -> None:
    required_library()
    inputs = inputs_of(4, 3, 40, torch.bfloat16)

    def step() -> list[Tensor]:
        *rest, top = compute(dispatched, *inputs)
        return [*rest, dispatched.add(rest[3], top.unsqueeze(1)), dispatched.multiply(top, inputs[0][0])]

    results, recorded = record(step, StepMemory())
    assert isinstance(recorded, RecordedStep), recorded
    inputs[0].mul_(-0.5)
    recorded.replay()
    for replayed, fresh in zip(results, step(), strict=True):
        assert torch.equal(replayed, fresh)
