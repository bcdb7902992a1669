"""Operations on rows of logits against PyTorch, at odd vocabularies and with numbers that are none."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels import reference
from pagewick.kernels.options import DrawOptions
from tests.kernels.conftest import NativeKernels

Kernels = ModuleType | NativeKernels

INF, NAN = float("inf"), float("nan")
# Around a vector, four of them, and the pieces of 8,192.
VOCABULARIES = [1, 2, 3, 15, 16, 17, 63, 65, 1031, 8191, 8192, 8193, 16_384, 20_011]


def random_logits(num_rows: int, vocab_size: int) -> Tensor:
    return 5 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_argmax_finds_the_first_of_equals(kernels: Kernels, vocab_size: int) -> None:
    logits = torch.cat((random_logits(5, vocab_size), random_logits(5, vocab_size).round(), torch.zeros(1, vocab_size)))
    for row, token_id in zip(logits, kernels.argmax_rows(logits)[0].tolist(), strict=True):
        assert token_id == (row == row.max()).nonzero()[0]
    assert torch.equal(kernels.argmax_rows(logits)[1], logits.amax(-1))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_argmax_at_every_place(kernels: Kernels, vocab_size: int) -> None:
    places = torch.arange(0, vocab_size, max(1, vocab_size // 61))
    logits = random_logits(1, vocab_size).repeat(len(places), 1)
    for highest in (100.0, INF, NAN):
        logits[torch.arange(len(places)), places] = highest
        token_ids, values = kernels.argmax_rows(logits)
        assert torch.equal(token_ids, places)
        torch.testing.assert_close(values, torch.full((len(places),), highest), rtol=0, atol=0, equal_nan=True)
    assert [found.tolist() for found in kernels.argmax_rows(torch.full((1, vocab_size), -INF))] == [[0], [-INF]]


def test_argmax_takes_the_first_nan(kernels: Kernels) -> None:
    for first in (0, 5, 40, 8191, 8192, 20_000):
        logits = random_logits(2, 20_011)
        logits[0, [first, 20_009, 20_010]] = NAN
        logits[0, 1] = INF
        token_ids, values = kernels.argmax_rows(logits)
        assert token_ids.tolist() == [first, logits[1].argmax()]
        assert values[0].isnan() and values[1] == logits[1].max()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_log_softmax_stats(kernels: Kernels, vocab_size: int, scale: float) -> None:
    logits = random_logits(5, vocab_size) * scale
    logits[1, 1::2] = -INF
    logits[2, : vocab_size // 2] = -INF
    highest, log_sum = kernels.log_softmax_stats(logits)
    assert torch.equal(highest, logits.amax(-1))
    expected = (logits.double() - logits.amax(-1, keepdim=True).double()).logsumexp(-1)
    # Up to 512 additions in float32 follow each other, with 4 chains of 4 lanes in a piece of 8,192.
    torch.testing.assert_close(log_sum.double(), expected, rtol=5e-7, atol=2e-6)
    logprobs = (logits - highest.unsqueeze(1)) - log_sum.unsqueeze(1)
    torch.testing.assert_close(logprobs.double(), logits.double().log_softmax(-1), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [1, 17, 20_011])
def test_stats_of_what_is_no_number(kernels: Kernels, vocab_size: int) -> None:
    for place in {0, vocab_size // 2, vocab_size - 1}:
        logits = random_logits(4, vocab_size)
        logits[0, place], logits[1, place], logits[2] = NAN, INF, -INF
        highest, log_sum = kernels.log_softmax_stats(logits)
        assert highest[0].isnan()
        assert highest[1:3].tolist() == [INF, -INF]
        assert log_sum[:3].isnan().all()
        assert log_sum[3].isfinite()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("num_top", [0, 1, 2, 20, 200])
def test_ranks_and_the_most_likely_tokens(kernels: Kernels, vocab_size: int, num_top: int) -> None:
    num_top = min(num_top, vocab_size)
    logits = torch.cat((random_logits(4, vocab_size), random_logits(4, vocab_size).round(), torch.zeros(1, vocab_size)))
    logits[1, 1::2], logits[2, : vocab_size // 2], logits[3, 0] = -INF, -INF, INF
    token_ids = torch.arange(len(logits)) * 7919 % vocab_size
    ranks, top_ids, top_logits = kernels.rank_tokens(logits, token_ids, num_top)
    assert top_ids.shape == top_logits.shape == (len(logits), num_top)
    assert ranks.tolist() == [1 + int((row > row[i]).sum()) for row, i in zip(logits, token_ids, strict=True)]
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    assert torch.equal(top_logits, logits.gather(1, order))
    # PyTorch promises no order of equal ones.
    assert torch.equal(top_logits, logits.gather(1, top_ids))
    assert not isinstance(kernels, NativeKernels) or torch.equal(top_ids, order)


def test_ranks_of_a_row_without_numbers_change_no_other(native: NativeKernels) -> None:
    logits, token_ids = random_logits(3, 1031), torch.tensor([5, 6, 7])
    expected = native.rank_tokens(logits, token_ids, 20)
    logits[1, 70] = NAN
    for found, wanted in zip(native.rank_tokens(logits, token_ids, 20), expected, strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    for wrong in (-1, 1031):
        with pytest.raises(IndexError, match=r"outside 0 \.\. 1030"):
            native.rank_tokens(logits, torch.tensor([0, wrong, 0]), 1)
    for arguments in ((token_ids[:2], 1), (token_ids, 1032), (token_ids, -1)):
        with pytest.raises(ValueError, match="for logits"):
            native.rank_tokens(logits, *arguments)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_masks_exclude_tokens(kernels: Kernels, vocab_size: int) -> None:
    logits = random_logits(5, vocab_size)
    logits[3, :: max(1, vocab_size // 3)], logits[4] = NAN, INF
    is_allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    is_allowed[0], is_allowed[1] = True, False
    before = logits.clone()
    masked = kernels.mask_rows(logits, packed(is_allowed))
    expected = torch.where(is_allowed, logits, -INF)
    torch.testing.assert_close(masked, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def packed(is_allowed: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(is_allowed, axis=1, bitorder="little"))


@pytest.mark.parametrize("share", [0.5, 0.001])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_greatest_that_a_mask_allows(kernels: Kernels, vocab_size: int, share: float) -> None:
    logits = torch.cat((random_logits(6, vocab_size), random_logits(3, vocab_size).round()))
    is_allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < share
    is_allowed[0], is_allowed[1] = True, False
    logits[2, vocab_size // 2], logits[3, ::3], logits[4, -1], logits[5] = NAN, NAN, INF, -INF
    token_ids, values, highest = kernels.argmax_allowed(logits, packed(is_allowed))
    expected = torch.where(is_allowed, logits, -INF)
    assert torch.equal(token_ids, expected.argmax(-1))
    torch.testing.assert_close(values, expected.amax(-1), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(highest, logits.amax(-1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_one_allowed_token_is_found_at_every_place(kernels: Kernels, vocab_size: int) -> None:
    places = torch.arange(0, vocab_size, max(1, vocab_size // 61))
    is_allowed = torch.zeros(len(places), vocab_size, dtype=torch.bool)
    is_allowed[torch.arange(len(places)), places] = True
    logits = random_logits(1, vocab_size).repeat(len(places), 1)
    token_ids, values, highest = kernels.argmax_allowed(logits, packed(is_allowed))
    assert torch.equal(token_ids, places)
    assert torch.equal(values, logits[0, places]) and torch.equal(highest, logits.amax(-1))


def test_masks_of_a_wider_matrix_and_of_another_size(native: NativeKernels) -> None:
    logits, masks = random_logits(7, 9001)[::2, :8999], torch.full((4, 1125), 0x55, dtype=torch.uint8)
    expected = logits.clone()
    expected[:, 1::2] = -INF
    assert torch.equal(native.mask_rows(logits, masks), expected)
    assert torch.equal(native.argmax_allowed(logits, masks)[0], expected.argmax(-1))
    draw = DrawOptions(torch.ones(4), torch.zeros(4), torch.zeros(4).long(), torch.ones(4), torch.full((4,), 0.5))
    assert torch.equal(native.sample_tokens(logits, draw, masks), native.sample_tokens(expected, draw))
    for wrong in (masks[:3], masks[:, :1124], torch.cat((masks, masks), dim=1)):
        for operation in (native.mask_rows, native.argmax_allowed, partial(native.sample_tokens, logits, draw)):
            arguments = (wrong,) if isinstance(operation, partial) else (logits, wrong)
            with pytest.raises(ValueError, match=r"masks must be \[4, 1125\]"):
                operation(*arguments)


def test_rows_of_a_wider_matrix(native: NativeKernels) -> None:
    wide = random_logits(7, 9001)
    logits = wide[::2, :8999]
    assert torch.equal(native.argmax_rows(logits)[0], logits.argmax(-1))
    for strided, own in zip(
        native.log_softmax_stats(logits), native.log_softmax_stats(logits.contiguous()), strict=True
    ):
        assert torch.equal(strided, own)


def test_same_bits_alone_batched_and_threaded(native: NativeKernels) -> None:
    logits = random_logits(33, 20_011)
    _, log_sum = native.log_softmax_stats(logits)
    token_ids, values = native.argmax_rows(logits)
    assert torch.equal(values, logits.amax(-1))
    alone = [native.log_softmax_stats(row)[1] for row in logits.split(1)]
    assert torch.equal(torch.cat(alone), log_sum)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.log_softmax_stats(logits)[1], log_sum)
        assert torch.equal(native.argmax_rows(logits)[0], token_ids)


def test_no_rows(kernels: Kernels) -> None:
    assert [found.shape for found in kernels.argmax_rows(torch.empty(0, 17))] == [(0,)] * 2
    no_masks = torch.empty(0, 3, dtype=torch.uint8)
    assert [found.shape for found in kernels.argmax_allowed(torch.empty(0, 17), no_masks)] == [(0,)] * 3
    assert [each.shape for each in kernels.log_softmax_stats(torch.empty(0, 17))] == [(0,), (0,)]


def test_what_does_not_fit_is_left_to_the_reference(native: NativeKernels) -> None:
    logits = random_logits(3, 17)
    assert torch.equal(native.argmax_rows(logits.double())[0], logits.argmax(-1))
    assert torch.equal(native.log_softmax_stats(logits.T)[1], reference.log_softmax_stats(logits.T)[1])
    assert torch.equal(dispatched.argmax_rows(logits.double())[0], logits.argmax(-1))
    assert torch.equal(dispatched.argmax_rows(logits.T)[0], logits.T.argmax(-1))
