"""All operations on running states: the same bits in any company, in any chunks, on any threads, and recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels as dispatched
from pagewick.kernels.recorded_steps import NextInputs, RecordedStep, StepMemory, record
from tests.kernels.conftest import NativeKernels, required_library
from tests.kernels.delta import make_channel_delta, make_delta
from tests.kernels.scan import make_channel_scan, make_convolution, make_plain_convolution, make_scan
from tests.kernels.states import (
    ROUNDING,
    StateBatch,
    assert_is_expected,
    assert_padding_changes_nothing,
    assert_same_bits_in_chunks,
    assert_states_stop_before_draft_tokens,
)

MAKERS: list[Callable[..., StateBatch]] = [
    make_delta, make_channel_delta, make_scan, make_channel_scan, make_convolution, make_plain_convolution,
]  # fmt: skip


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("make", MAKERS)
def test_a_ragged_batch(
    operations: ModuleType | NativeKernels, make: Callable[..., StateBatch], dtype: torch.dtype, in_place: bool
) -> None:
    batch = make([1, 2, 3, 5, 33, 0, 1], [0, 7, 0, 1, 2, 3, 40], dtype=dtype, in_place=in_place)
    assert_is_expected(batch.run(batch.of_module(operations)), batch)


@pytest.mark.parametrize("make", MAKERS)
def test_a_sequence_has_the_same_bits_alone_and_in_chunks(
    operations: ModuleType | NativeKernels, make: Callable[..., StateBatch]
) -> None:
    batch = make([1, 2, 3, 150, 1], [0, 7, 0, 1, 40], dtype=torch.bfloat16)
    cuts = {1: [0, 2], 2: [0, 1, 2, 3], 3: [0, 1, 3, 20, 21, 150], 4: [0, 1]}
    assert_same_bits_in_chunks(batch, operations, cuts)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_draft_tokens_change_no_state(
    operations: ModuleType | NativeKernels, make: Callable[..., StateBatch], in_place: bool
) -> None:
    """Where there are more of them than inputs of a convolution, or fewer, and where a chunk or a slice ends."""
    batch = make([1, 2, 70, 5, 40, 131, 6], [3, 0, 5, 1, 40, 0, 0], dtype=torch.bfloat16, in_place=in_place)
    num_stored = {1: 1, 2: 62, 3: 4, 4: 32, 5: 130, 6: 6}
    assert_states_stop_before_draft_tokens(batch, operations, num_stored)


@pytest.mark.parametrize("make", MAKERS)
def test_padding_changes_nothing_but_its_own_block(
    operations: ModuleType | NativeKernels, make: Callable[..., StateBatch]
) -> None:
    assert_padding_changes_nothing(make([2, 1, 1, 1], [5, 0, 0, 0]), operations)


@pytest.mark.parametrize("make", MAKERS)
def test_blocks_that_are_larger_give_the_same(
    operations: ModuleType | NativeKernels, make: Callable[..., StateBatch]
) -> None:
    batch = make([1, 3], [0, 2])
    operation = batch.of_module(operations)
    larger = replace(batch, states=torch.cat((batch.states, batch.states[:, :8]), dim=1))
    assert torch.equal(larger.run(operation)[0], batch.run(operation)[0])


@pytest.mark.parametrize(
    "batch",
    [
        *(
            make_delta([1, 70, 2], [9, 0, 3], heads=heads, dims=dims, dtype=torch.bfloat16, in_place=True)
            for heads in ((2, 4), (1, 3))
            for dims in ((24, 40), (16, 150))
        ),
        *(
            make_scan([1, 270, 2], [9, 0, 3], heads=heads, dims=dims, dtype=torch.bfloat16, in_place=True)
            for heads in ((4, 2), (3, 1))
            for dims in ((24, 40), (150, 16))
        ),
        make_convolution([1, 150, 2], [9, 4, 3], num_channels=2050, dtype=torch.bfloat16, in_place=True),
        make_channel_scan([1, 70, 2], [9, 4, 3], num_channels=300, dtype=torch.bfloat16, in_place=True),
    ],
    ids=lambda batch: batch.OPERATION,
)
def test_any_number_of_threads_gives_the_same_bits(native: NativeKernels, batch: StateBatch) -> None:
    """Few threads take whole heads, many take columns, and the tokens of a long prompt are in several slices."""
    operation = batch.of_module(native)
    one = batch.run(operation)
    assert_is_expected(one, batch)
    rows = batch.of(1)
    for threads in (2, 4, 7):
        native.set_num_threads(threads)
        assert all(map(torch.equal, batch.run(operation), one))
        # Draft tokens at the end of a slice, and beyond it.
        for count in (1, 62, 128, rows.stop - rows.start - 3):
            if count < rows.stop - rows.start:
                assert_states_stop_before_draft_tokens(batch, native, {1: count, 2: 1})


@pytest.mark.parametrize("make", MAKERS)
def test_it_goes_to_the_library_and_can_be_recorded(make: Callable[..., StateBatch]) -> None:
    library = required_library()
    batch = make([1, 1], [5, 0], in_place=True)
    operation = batch.of_module(dispatched)
    out, states = batch.run(operation)
    assert torch.equal(out, batch.run(batch.of_module(NativeKernels(library)))[0])
    current = batch.states.clone()

    def step() -> list[Tensor]:
        return [replace(batch, states=current).in_place(operation)]

    (result,), recorded = record(step, StepMemory())
    assert isinstance(recorded, RecordedStep)
    assert torch.equal(current, states)
    rows: Tensor = getattr(batch, batch.ROWS[0])
    rows.copy_(rows.flip(0))
    batch.batch.context_lens.add_(1)
    expected, left = replace(batch, states=current).run(operation)
    recorded.replay()
    assert torch.equal(result, expected)
    assert torch.equal(current, left)


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_never_runs_ahead(make: Callable[..., StateBatch]) -> None:
    """It would be advanced once more for tokens that then do not come."""
    required_library()
    batch = make([1, 1], [5, 3], in_place=True)
    operation = batch.of_module(dispatched)
    current = batch.states.clone()
    _, recorded = record(lambda: [replace(batch, states=current).in_place(operation)], StepMemory())
    assert isinstance(recorded, RecordedStep)
    dispatched.set_num_threads(2)
    recorded.replay(next_inputs=NextInputs([], [batch.batch.context_lens.numpy()]))
    after = current.clone()
    time.sleep(0.01)
    assert torch.equal(current, after)
    _, expected = replace(batch, states=after).run(operation)
    recorded.resume()
    assert torch.equal(current, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_lens": torch.tensor([2], dtype=torch.int32)}, "contradict each other"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "contradict each other"),
        ({"block_tables": torch.tensor([[9, 2, 0]], dtype=torch.int32)}, "outside the 4 blocks"),
        ({"block_tables": torch.tensor([[2, -1, 0]], dtype=torch.int32)}, "outside the 4 blocks"),
        ({"block_tables": torch.tensor([[2, 3, 4]], dtype=torch.int32)}, "contradict each other"),
        ({"block_tables": torch.tensor([[2, 3, -1]], dtype=torch.int32)}, "contradict each other"),
        ({"block_tables": torch.zeros(1, 3)}, "block_tables must be int32"),
        ({"block_tables": torch.zeros(1, 2).int()}, r"must be \[B, 3\]"),
        ({"states": torch.zeros(4, 32, dtype=torch.uint8)}, "are too few"),
        ({"states": torch.zeros(4, 65536, dtype=torch.uint8)[:, 4:32772]}, "contiguous"),
    ],
)
@pytest.mark.parametrize("make", MAKERS)
def test_places_that_do_not_fit_are_refused(
    make: Callable[..., StateBatch], changes: dict[str, Any], message: str
) -> None:
    batch = make([3], [4]).changed(changes)
    with pytest.raises(ValueError, match=message):
        batch.in_place(batch.of_module(NativeKernels(required_library())))
