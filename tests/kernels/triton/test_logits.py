"""Whole rows of logits in Triton, and random numbers, against their definitions, interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.reference_sampling import Purpose
from tests.kernels.triton.comparison import numbers

logits = pytest.importorskip("pagewick.kernels.triton.logits")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def rows() -> Tensor:
    """Rows of more than one part, with ties and everything that is no number."""
    x = numbers(9, logits.PART + 809).round(decimals=1)
    x[1, [8500, 20]], x[2], x[3, 5], x[4] = float("nan"), float("-inf"), float("inf"), 0
    x[4, ::2], x[5, : logits.PART], x[6], x[7, 40] = -0.0, float("-inf"), float("-inf"), -float("nan")
    x[6, 9000] = -5
    return x


def test_argmax_is_exact() -> None:
    found, values = logits.argmax_rows(rows())
    expected_ids, expected_values = reference.argmax_rows(rows())
    assert torch.equal(found, expected_ids) and found.dtype == torch.int64
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    assert [logits.argmax_rows(row.unsqueeze(0))[0].item() for row in rows()[:3]] == expected_ids[:3].tolist()


def test_log_softmax_stats() -> None:
    found, expected = logits.log_softmax_stats(rows()), reference.log_softmax_stats(rows())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    alone = logits.log_softmax_stats(rows()[8:])
    assert torch.equal(alone[1][0], found[1][8])


def test_masks() -> None:
    x = numbers(3, 1030)
    masks = torch.randint(0, 256, (3, 129), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits.mask_rows(x, masks), reference.mask_rows(x, masks))
    wide = numbers(3, 1100)[:, :1030]
    assert torch.equal(logits.mask_rows(wide, masks), reference.mask_rows(wide, masks))
    for found, expected in zip(logits.argmax_allowed(x, masks), reference.argmax_allowed(x, masks), strict=True):
        assert torch.equal(found, expected)


def test_random_numbers_have_the_same_bits() -> None:
    columns = torch.randint(-(2**63), 2**63 - 1, (3, 131), generator=torch.Generator().manual_seed(1))
    for purpose in Purpose:
        assert torch.equal(logits.philox_uniform(*columns, purpose), reference.philox_uniform(*columns, purpose))


def test_other_calls_pass_to_the_definition() -> None:
    x = numbers(2, 30).double()
    assert torch.equal(logits.argmax_rows(x)[0], reference.argmax_rows(x)[0])
    assert logits.argmax_rows(numbers(0, 30))[0].shape == (0,)
    assert torch.equal(logits.log_softmax_stats(x)[1], reference.log_softmax_stats(x)[1])
