"""The columns of slots against the parameters of each, and noise against its definition."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pagewick.engine.batch import SlotSampling
from pagewick.engine.sampling.columns import NUM_NOISE_AHEAD, SamplingColumns
from pagewick.engine.sampling.traits import traits_of
from pagewick.kernels import reference
from pagewick.kernels.reference_sampling import Purpose
from pagewick.sampling_params import SamplingParams
from tests.engine.sample_rows import random_row

SEEDS = ((0, 0), (0, 1), (2**63 - 1, 0), (-5, 3))


def sampling(seed: int = 0, choice_index: int = 0, **fields: Any) -> SlotSampling:
    params = SamplingParams(**fields)
    return SlotSampling(params, seed, choice_index, num_prompt_tokens=5, stop_token_ids=[3])


def columns_of(slots: list[SlotSampling]) -> SamplingColumns:
    columns = SamplingColumns(len(slots))
    for slot, one in enumerate(slots):
        columns.set(slot, one)
    return columns


def noise(columns: SamplingColumns, places: list[tuple[int, int]]) -> list[float]:
    """places: slots and positions."""
    found: list[float] = columns.noise(*(np.array(column, np.int64) for column in zip(*places, strict=True))).tolist()
    return found


def defined(slots: list[SlotSampling], places: list[tuple[int, int]]) -> list[float]:
    """One place at a time."""
    return [
        reference.philox_uniform(
            torch.tensor([slots[slot].seed]),
            torch.tensor([slots[slot].choice_index]),
            torch.tensor([position]),
            Purpose.SAMPLE,
        ).item()
        for slot, position in places
    ]


def test_noise_is_that_of_seed_choice_and_position_wherever_sequences_stand() -> None:
    random = Random(7)
    slots = [sampling(seed, choice) for seed, choice in SEEDS]
    columns = columns_of(slots)
    positions = [random.choice([0, 1, 63, 2**32 - 3]) for _ in slots]
    for _ in range(40):
        chosen = random.sample(range(len(slots)), random.randint(1, len(slots)))
        # With draft tokens a step asks for several places of one sequence; a preemption takes none of them back.
        places = [(slot, positions[slot] + ahead) for slot in chosen for ahead in range(random.randint(1, 5))]
        assert noise(columns, places) == defined(slots, places)
        for slot in chosen:
            positions[slot] += random.choice([0, 1, 2, NUM_NOISE_AHEAD - 1])


def test_noise_of_earlier_positions_is_found_again() -> None:
    slots = [sampling(11)]
    columns = columns_of(slots)
    for position in (NUM_NOISE_AHEAD, NUM_NOISE_AHEAD - 1, 2 * NUM_NOISE_AHEAD, 0, NUM_NOISE_AHEAD - 1):
        assert noise(columns, [(0, position)]) == defined(slots, [(0, position)])


def test_a_slot_forgets_the_noise_of_the_sequence_before() -> None:
    columns = columns_of([sampling(1)])
    noise(columns, [(0, 7)])
    columns.set(0, sampling(2))
    assert noise(columns, [(0, 7)]) == defined([sampling(2)], [(0, 7)])


@pytest.mark.parametrize("seed", range(3))
def test_columns_hold_what_every_slot_asks_for(seed: int) -> None:
    random = Random(seed)
    slots = [random_row(random, vocab_size=40).sampling for _ in range(23)]
    columns = columns_of(slots)
    order = random.sample(range(len(slots)), 17)
    positions = [random.randrange(400) for _ in order]
    draws = columns.draws(np.array(order), np.array(positions))
    for place, slot in enumerate(order):
        params, traits = slots[slot].params, traits_of(slots[slot])
        assert draws.is_drawn[place] == traits.is_drawn
        if traits.is_drawn:
            assert draws.temperature[place] == np.float32(params.temperature)
            assert [draws.noise[place]] == defined(slots, [(slot, positions[place])])
        else:
            assert draws.temperature[place] == 0
        assert (draws.top_k[place], draws.top_p[place]) == (params.top_k, np.float32(params.top_p))
        assert columns.is_edited[slot] == traits.is_edited
        assert columns.needs_row[slot] == (traits.is_edited or traits.is_truncated)
        assert columns.min_position[slot] == traits.min_position


def test_draws_ahead_hold_the_noise_of_this_token_and_of_the_next() -> None:
    slots = [sampling(1, temperature=0.7, min_p=0.1, top_k=9, top_p=0.3), sampling(2, temperature=0.0), sampling(3, 1)]
    columns, rows = columns_of(slots), np.arange(3)
    for position in [*range(5, 2 * NUM_NOISE_AHEAD + 9), 3]:
        positions = np.array([position, position + 40, position + 7])
        *options, noise_now, noise_next = columns.draws_ahead(rows, positions)
        for found, ahead in ((noise_now, 0), (noise_next, 1)):
            first, third = defined(slots, [(0, position + ahead), (2, position + 7 + ahead)])
            assert found.tolist() == [first, 0.0, third]
        expected = columns.draws(rows, positions).options
        assert [column.tolist() for column in options] == [column.tolist() for column in expected[:4]]
    columns.set(0, sampling(4))
    assert columns.draws_ahead(rows[:1], np.array([4]))[-1].tolist() == defined([sampling(4)], [(0, 5)])
