"""The gated delta rule in Triton, interpreted: against transformers, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagewick.kernels import batch_invariance, reference
from tests.deep import IS_DEEP
from tests.kernels.delta import make_channel_delta, make_delta
from tests.kernels.states import (
    ROUNDING,
    assert_is_expected,
    assert_padding_changes_nothing,
    assert_same_bits_in_chunks,
    assert_states_stop_before_draft_tokens,
    metadata,
)
from tests.kernels.triton.harness import IS_COMPILED

from pagewick.kernels.triton import delta as kernels  # isort: skip  (the harness skips this module without Triton)
from pagewick.kernels.triton.chunk_launches import LONG  # isort: skip


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ragged_batch(dtype: torch.dtype) -> None:
    is_exact = dtype == torch.float32
    delta = make_delta([1, 2, 5, 1], [0, 7, 1, 2], heads=(1, 2), dims=(32, 16), dtype=dtype, in_place=is_exact)
    # The interpreter cuts off what does not fit into bfloat16: twice the error of a rounding.
    assert_is_expected(delta.run(kernels.gated_delta_net), delta, num_roundings=2)


@pytest.mark.parametrize(
    ("heads", "dims", "width"),
    [
        ((1, 1), (16, 64), 2),
        ((1, 3), (16, 16), 3),
        *([((2, 4), (128, 128), 4), ((1, 1), (256, 256), 4)] if IS_DEEP else []),
    ],
)
def test_heads_dimensions_and_widths(heads: tuple[int, int], dims: tuple[int, int], width: int) -> None:
    delta = make_delta([1, 3], [3, 0], heads=heads, dims=dims, width=width)
    assert_is_expected(delta.run(kernels.gated_delta_net), delta)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_channels_that_decay_by_themselves(dtype: torch.dtype) -> None:
    delta = make_channel_delta([1, 5, 2], [3, 0, 1], heads=(2, 2), dims=(32, 16), width=2, dtype=dtype)
    assert_is_expected(delta.run(kernels.gated_delta_net), delta, num_roundings=2)
    assert_same_bits_in_chunks(delta, kernels, {1: [0, 1, 5]})


def test_decays_with_a_bound() -> None:
    delta = make_channel_delta([1, 5, 2], [3, 0, 1], heads=(2, 2), dims=(32, 16), width=2, decay_bound=-3.0)
    assert_is_expected(delta.run(kernels.gated_delta_net), delta)
    assert_same_bits_in_chunks(delta, kernels, {1: [0, 1, 5]})


def test_states_that_take_in_twice_a_difference() -> None:
    """With the sizes of OLMo Hybrid's heads, which are no powers of two."""
    delta = make_delta([1, 3], [3, 0], heads=(1, 1), dims=(96, 192), width=2, strength=2.0)
    assert_is_expected(delta.run(kernels.gated_delta_net), delta)
    assert_same_bits_in_chunks(delta, kernels, {1: [0, 1, 3]})


@pytest.mark.parametrize("has_channel_decay", [False, True])
def test_prompts_are_taken_in_chunks(has_channel_decay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside sequences that are not; test_chunks.py has the details."""
    sizes: dict[str, Any] = {"dims": (64, 32), "width": 2, "dtype": torch.float16}
    if has_channel_decay:
        delta = make_channel_delta([2, LONG, 1], [7, 9, 0], heads=(1, 1), decay_bound=-2.0, **sizes)
    else:
        delta = make_delta([2, LONG, 1], [7, 9, 0], heads=(1, 2), **sizes)
    found = delta.run(kernels.gated_delta_net)
    # Products of tensor cores have tf32's digits.
    assert_is_expected(found, delta, error=2**-7 if IS_COMPILED else 0.0)
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    one_by_one = delta.run(kernels.gated_delta_net)
    assert_is_expected(one_by_one, delta)
    is_same = (found[1] == one_by_one[1]).all(1)[delta.batch.block_tables[:, 1]]
    assert is_same.tolist() == [True, False, True]


def test_a_sequence_has_the_same_bits_alone_and_in_chunks() -> None:
    delta = make_delta([1, 6, 2], [4, 0, 1], heads=(1, 2), dims=(16, 16), in_place=True)
    assert_same_bits_in_chunks(delta, kernels, {0: [0, 1], 1: [0, 1, 3, 6]})


def test_draft_tokens_change_no_state() -> None:
    delta = make_delta([1, 4, 3], [4, 0, 1], heads=(1, 2), dims=(16, 16), width=3, in_place=True)
    assert_states_stop_before_draft_tokens(delta, kernels, {1: 3, 2: 1})
    # However many tokens there are, they are taken one by one.
    delta = make_delta([LONG], [3], heads=(1, 1), dims=(64, 32), width=2, dtype=torch.float16)
    delta = delta.changed({"block_tables": delta.batch.block_tables.index_fill(1, torch.tensor(2), LONG - 1)})
    (out, states), (expected, left) = delta.run(kernels.gated_delta_net), delta.run(reference.gated_delta_net)
    torch.testing.assert_close(out, expected, rtol=2**-9, atol=2e-5)
    torch.testing.assert_close(states.view(torch.float32), left.view(torch.float32), equal_nan=True)


def test_padding_changes_nothing_but_its_own_block() -> None:
    assert_padding_changes_nothing(make_delta([2, 1, 1, 1], [5, 0, 0, 0], heads=(1, 1), dims=(16, 16)), kernels)


def test_more_sequences_than_a_program_compares_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        key: replace(each, constexprs=each.constexprs | {"BLOCK_B": 2}) for key, each in kernels._CONVOLUTIONS.items()
    }
    monkeypatch.setattr(kernels, "_CONVOLUTIONS", few)
    delta = make_delta([1, 2, 1, 2, 1], [3, 0, 1, 2, 0], heads=(1, 1), dims=(16, 16), width=2)
    assert_is_expected(delta.run(kernels.gated_delta_net), delta)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_numbers_give_no_infinities() -> None:
    delta = make_delta([5], [4], heads=(1, 1), dims=(16, 16))
    for name in ("qkv", "gate", "beta", "decay"):
        delta = replace(delta, **{name: 100 * getattr(delta, name)})
    assert_is_expected(delta.run(kernels.gated_delta_net), delta)


def test_unsupported_calls_go_to_the_definition() -> None:
    delta = make_delta([2, 1], [1, 0])
    assert all(map(torch.equal, delta.run(kernels.gated_delta_net), delta.run(reference.gated_delta_net)))
    wide = make_delta([2], [1], dims=(16, 16), dtype=torch.float64)
    assert torch.equal(wide.run(kernels.gated_delta_net)[0], wide.run(reference.gated_delta_net)[0])


def test_a_step_without_tokens() -> None:
    delta = make_delta([1], [2], dims=(16, 16))
    empty = replace(delta.only(0, 0, 0), batch=metadata([[0, 0]], [0], [0]))
    out, states = empty.run(kernels.gated_delta_net)
    assert out.shape == (0, 64) and torch.equal(states, delta.states)
