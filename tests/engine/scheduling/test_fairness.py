"""Shortages: keys get equal shares, requests of one key are served in order of arrival, and streams continue."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from pagewick.engine.scheduling.fair_queue import OUTPUT_WEIGHT
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.jobs import VOCAB_SIZE
from tests.engine.requests import Simulation, full_spec, recurrent_spec, token_ids_of, window_spec

# Shortages of slots, blocks, or tokens per step.
SHORTAGES: dict[str, dict[str, Any]] = {
    "slots": {"num_blocks": [400], "max_num_seqs": 8, "budget": 128},
    "blocks": {"num_blocks": [40], "max_num_seqs": 64, "budget": 128},
    "both": {"num_blocks": [60], "max_num_seqs": 6, "budget": 64},
    "budget": {"num_blocks": [800], "max_num_seqs": 12, "budget": 24},
}


def prompt(number: int, length: int = 16) -> list[int]:
    return [(number * 7 + place * (number + 3)) % VOCAB_SIZE for place in range(length)]


def steps_to_first_token(simulation: Simulation, request_id: str) -> int:
    for number in range(1, 1000):
        if any(delta.request_id == request_id and delta.token_ids for delta in simulation.step()):
            return number
    raise AssertionError("it never comes")


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_who_asks_for_little_does_not_wait_behind_who_asks_for_much(shortage: str) -> None:
    """One key sends 50 requests at once; another, one at a time, hardly notices."""
    alone = Simulation(**SHORTAGES[shortage])
    alone.add(prompt(99), max_tokens=12)
    num_alone = steps_to_first_token(alone, "r1")
    simulation = Simulation(**SHORTAGES[shortage])
    for number in range(50):
        simulation.add(prompt(number), max_tokens=40, fairness_key="much")
    for number in range(8):
        job = simulation.add(prompt(60 + number), max_tokens=12, fairness_key="little")
        request_id = job.request.request_id
        assert steps_to_first_token(simulation, request_id) <= num_alone + 2
        while request_id in simulation.live:
            deltas = [delta for delta in simulation.step() if delta.request_id == request_id]
            assert len(token_ids_of(deltas)) == 1, "a step without a token for it"
            check_books(simulation)
    assert simulation.live, "the 50 were over before: nothing was short"
    simulation.run(5000)
    check_nothing_is_left(simulation)


def test_keys_that_all_have_work_are_served_alike() -> None:
    """Within the bound of Sheng et al. 2024, theorem 4.4: twice the larger of the longest prompt and a full batch."""
    simulation = Simulation(num_blocks=[40], max_num_seqs=16, budget=32, max_model_len=40)
    bound = 2 * max(20, OUTPUT_WEIGHT * 40 * 4)
    sizes = {"short": (4, 6), "long": (20, 20), "much to say": (2, 30)}
    for number in range(150):
        for key, (num_prompt_tokens, max_tokens) in sizes.items():
            simulation.add(prompt(number, num_prompt_tokens), max_tokens=max_tokens, fairness_key=key)
    while {seq.fairness_key for seq in simulation.waiting} == sizes.keys():
        simulation.step()
        served = simulation.scheduler._shares._served.values()
        assert max(served) - min(served) <= bound
    assert min(served) > 2 * bound
    simulation.run(10000)


def test_keys_do_not_push_each_other_out_in_turn() -> None:
    simulation = Simulation(num_blocks=[400], max_num_seqs=4)
    for number in range(60):
        simulation.add(prompt(number), max_tokens=10, fairness_key="one")
    simulation.step()
    for number in range(60):
        simulation.add(prompt(number), max_tokens=10, fairness_key="two")
    simulation.run()
    # Four of the first ran, and one of them had to make room. The rest is evened out where places become free.
    assert simulation.num_preemptions == 1


def test_a_better_priority_takes_a_place_at_once_and_a_worse_one_never() -> None:
    simulation = Simulation(num_blocks=[400], max_num_seqs=2)
    for number in range(4):
        simulation.add(prompt(number), max_tokens=10, priority=1)
    simulation.step()
    simulation.add(prompt(9), max_tokens=10, priority=2)
    simulation.add(prompt(10), max_tokens=10)
    simulation.step()
    assert [seq.request_id for seq in simulation.running] == ["r6", "r1"]
    finished = [delta.request_id for deltas in iter(simulation.step, []) for delta in deltas if delta.finish_reason]
    assert finished == ["r1", "r6", "r2", "r3", "r4", "r5"] or finished == ["r6", "r1", "r2", "r3", "r4", "r5"]


def test_equals_are_served_as_they_came_however_often_they_give_way() -> None:
    """64 requests at a time and room for 4: nobody waits out of turn."""
    num_preemptions, num_rounds = 0, 0
    while num_preemptions < 1000:
        simulation = Simulation(num_blocks=[32], max_num_seqs=64, budget=256, enable_prefix_caching=num_rounds % 2 == 0)
        for number in range(64):
            simulation.add(prompt(100 * num_rounds + number, 2), max_tokens=30)
        ends: dict[str, int] = {}
        step = 0
        while simulation.live:
            step += 1
            ends |= {delta.request_id: step for delta in simulation.step() if delta.finish_reason}
            check_books(simulation)
        assert list(ends) == [f"r{number + 1}" for number in range(64)]
        assert max(ends.values()) <= 3 * median(ends.values())
        num_preemptions += simulation.num_preemptions
        num_rounds += 1
        check_nothing_is_left(simulation)
    assert num_rounds < 50


def test_a_prompt_of_32k_tokens_holds_up_no_stream() -> None:
    simulation = Simulation([full_spec(16)], [2200], max_num_seqs=16, budget=1024, max_model_len=33_000)
    for number in range(8):
        simulation.add(prompt(number), max_tokens=60)
    simulation.step()
    long = simulation.add(prompt(5, 32_000), max_tokens=2)
    num_steps = 0
    while True:
        deltas = simulation.step()
        num_steps += 1
        assert {delta.request_id for delta in deltas if delta.token_ids} >= {f"r{number + 1}" for number in range(8)}
        if any(delta.request_id == long.request.request_id for delta in deltas):
            break
    assert num_steps == -(-32_000 // (1024 - 8))


def test_with_fewer_tokens_than_streams_all_get_on_by_turns() -> None:
    """By keys: the one with a single stream has a token in every other step at least."""
    simulation = Simulation(num_blocks=[200], max_num_seqs=16, budget=4)
    job = simulation.add(prompt(20, 2), max_tokens=20, fairness_key="one")
    simulation.add(prompt(1, 2), max_tokens=20, n=9, temperature=1.0, fairness_key="many")
    simulation.step()
    assert len(simulation.running) == 10
    pauses, pause = [], 0
    while job.request.request_id in simulation.live:
        has_token = any(delta.request_id == job.request.request_id for delta in simulation.step())
        pause = 0 if has_token else pause + 1
        pauses.append(pause)
    assert len(pauses) >= 10 and max(pauses) <= 1
    simulation.run()


@pytest.mark.parametrize("specs", [[full_spec()], [window_spec(9)], [full_spec(), recurrent_spec(8, 8)]])
def test_a_long_queue_comes_to_its_end(specs: list[Any]) -> None:
    simulation = Simulation(specs, [12] * len(specs), max_num_seqs=5, budget=9, max_model_len=40)
    for number in range(60):
        keys = {"priority": number % 3, "fairness_key": str(number % 4)}
        simulation.add(
            prompt(number, 1 + number * 7 % 30), max_tokens=1 + number % 10, temperature=1.0, n=1 + number % 2, **keys
        )
    while simulation.live:
        simulation.step()
        check_books(simulation)
    check_nothing_is_left(simulation)
