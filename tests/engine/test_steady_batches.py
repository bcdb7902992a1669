"""Which batches are steady, so that the step after theirs may run ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import SlotSampling, SlotStart, SlotWork, StepPlan
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.slots import Slots
from pagewick.sampling_params import SamplingParams
from tests.engine.requests import full_spec, recurrent_spec
from tests.engine.test_slots import MAX_MODEL_LEN, make_slots, sampling


def continued(slots: Slots, numbers: list[int], starts: list[int], token_ids: list[int] | None = None) -> HostBatch:
    """The next step of these streams, whose last tokens are token_ids."""
    plan = StepPlan()
    plan.streams.slots, plan.streams.starts = numbers, starts
    slots.remember_last(np.array(numbers), torch.tensor(token_ids or [1] * len(numbers)))
    return slots.build(plan)


def start_streams(slots: Slots, specs: list[CacheSpec], params: list[SamplingParams], num_tokens: int = 1) -> None:
    """One stream in each slot, which holds num_tokens and has room for the longest sequence."""
    starts, works = [], []
    for slot, each in enumerate(params):
        tables = [[*range(30 * slot, 30 * slot + spec.num_blocks(MAX_MODEL_LEN))] for spec in specs]
        starts.append(SlotStart(slot, SlotSampling(each, 0, choice_index=0, num_prompt_tokens=1), tables))
        works.append(SlotWork(slot, 0, num_tokens, [3] * num_tokens, [[] for _ in specs], True))
    slots.build(StepPlan(starts=starts, work=works))


@pytest.mark.parametrize("sizes", [[8], [4, 16]])
def test_a_step_is_steady_while_the_next_token_falls_into_the_same_block(sizes: list[int]) -> None:
    specs = [full_spec(size) for size in sizes]
    slots = make_slots(*specs)
    start_streams(slots, specs, [SamplingParams(), SamplingParams()])
    found = {start: continued(slots, [0, 1], [start, start]).is_steady for start in range(1, MAX_MODEL_LEN)}
    # The first step of the streams does not continue another one, nor does that in which they enter a block.
    entered = [start for start in found if start == 1 or any(start % size == 0 for size in sizes)]
    left = [start for start in found if any((start + 1) % size == 0 for size in sizes)]
    assert [start for start in found if not found[start]] == sorted({*entered, *left, MAX_MODEL_LEN - 1})


def test_a_step_is_steady_if_every_stream_stays_in_its_block() -> None:
    specs = [full_spec(8)]
    slots = make_slots(*specs)
    start_streams(slots, specs, [SamplingParams(), SamplingParams()])
    assert [continued(slots, [0, 1], [1 + step, 4 + step]).is_steady for step in range(4)] == [False, True, True, False]


def test_a_step_is_steady_if_it_has_the_streams_of_the_step_before() -> None:
    specs = [full_spec(32)]
    slots = make_slots(*specs)
    start_streams(slots, specs, [SamplingParams()] * 3)
    chosen = [([0, 1], [1, 1]), ([0, 1], [2, 2]), ([0], [3]), ([0], [4]), ([0, 2], [5, 1]), ([0, 2], [6, 2])]
    assert [continued(slots, *each).is_steady for each in chosen] == [False, True, False, True, False, True]


@pytest.mark.parametrize(
    ("params", "is_steady"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"logprobs": 0}, False),
        ({"mirostat": 2, "temperature": 1.0}, False),
    ],
)
def test_a_step_is_steady_if_no_stream_reports_more_than_tokens(params: dict[str, Any], is_steady: bool) -> None:
    specs = [full_spec(32)]
    slots = make_slots(*specs)
    start_streams(slots, specs, [SamplingParams(), SamplingParams(**params)])
    continued(slots, [0, 1], [1, 1])
    assert continued(slots, [0, 1], [2, 2]).is_steady == is_steady


def test_steps_of_states_are_not_steady() -> None:
    """A running state that was read cannot be read again."""
    slots = make_slots(full_spec(32), recurrent_spec(8))
    work = SlotWork(0, 0, 1, [3], [[7], [-1, 1]], True)
    slots.build(StepPlan(starts=[SlotStart(0, sampling(), [[], [-1]])], work=[work]))
    assert not any(continued(slots, [0], [start]).is_steady for start in range(1, 6))
