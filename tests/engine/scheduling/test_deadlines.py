"""Requests that are not finished in time, and memory that the system refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.attention.cache_spec import CacheSpec
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.requests import Simulation, full_spec, recurrent_spec, window_spec


@pytest.mark.parametrize(
    ("options", "choices"),
    [({}, [0]), ({"n": 3, "temperature": 1.0}, [0, 1, 2]), ({"n": 2, "use_beam_search": True}, [0, 1])],
    ids=["one", "choices", "beams"],
)
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_request_ends_when_its_time_is_over_wherever_it_stands(
    options: dict[str, Any], choices: list[int], num_steps: int
) -> None:
    """Before it starts, in the middle of its prompt, and among its tokens."""
    simulation = Simulation(num_blocks=[40], budget=8)
    simulation.add(range(18), max_tokens=30, timeout_s=5.0, **options)
    well = simulation.add(range(20, 28), max_tokens=3)
    for _ in range(num_steps):
        simulation.step()
    simulation.now = 4.9
    simulation.step()
    assert "r1" in simulation.live
    simulation.now = 5.0
    deltas = [delta for delta in simulation.step() if delta.request_id == "r1"]
    assert [(delta.choice_index, delta.error_kind) for delta in deltas] == [
        (index, "DeadlineExceededError") for index in choices
    ]
    assert deltas[0].error == "the request was not finished within its timeout of 5 s"
    check_books(simulation)
    simulation.run()
    assert well.request.request_id not in simulation.live
    assert simulation.scheduler.refresh_stats().num_expired == 1
    check_nothing_is_left(simulation)


def test_the_deadline_of_one_is_not_that_of_another_with_its_name() -> None:
    simulation = Simulation()
    simulation.add(range(5), max_tokens=2, timeout_s=5.0, request_id="name")
    simulation.run()
    simulation.now = 4.0
    simulation.add(range(5), max_tokens=4, timeout_s=5.0, request_id="name")
    simulation.step()
    simulation.now = 6.0
    simulation.step()
    assert "name" in simulation.live
    simulation.now = 9.0
    assert [delta.error_kind for delta in simulation.step()] == ["DeadlineExceededError"]


def test_choices_that_were_stopped_are_not_told_of_the_deadline() -> None:
    simulation = Simulation()
    simulation.add(range(5), max_tokens=9, timeout_s=5.0, n=3)
    simulation.abort(choices=[("r1", 1)])
    simulation.now = 5.0
    assert [delta.choice_index for delta in simulation.step()] == [0, 2]


LAYOUTS = {"full": [full_spec()], "window": [window_spec(9)], "both": [full_spec(), recurrent_spec(8, 8)]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_further_memory_one_after_the_other_gets_what_it_was_promised(layout: str) -> None:
    specs: list[CacheSpec] = LAYOUTS[layout]
    simulation = Simulation(specs, [40] * len(specs), grow=lambda number: 0, max_model_len=40, budget=16)
    for number in range(6):
        simulation.add(range(number, number + 20), max_tokens=10, n=1 + number % 3, use_beam_search=number % 2 == 1)
    while simulation.live:
        simulation.step()
        check_books(simulation)
    check_nothing_is_left(simulation)
    # Nobody was given more than a single sequence takes.
    for spec, pool in zip(specs, simulation.blocks.pools, strict=True):
        most = 40 if spec.lookback is None else spec.lookback + 16
        assert pool.num_open <= spec.num_blocks(most) + 1


def test_sessions_end_before_memory_is_taken_by_force() -> None:
    granted = [6]

    def grow(number: int) -> int:
        given = min(number, granted[0])
        granted[0] -= given
        return given

    simulation = Simulation(num_blocks=[40], grow=grow, max_model_len=40)
    simulation.add(range(13), max_tokens=2, session_id="mine")
    simulation.run()
    assert simulation.blocks.pools[0].num_open == 4
    simulation.add([9] * 21, max_tokens=2)
    simulation.run()
    assert (simulation.blocks.pools[0].num_open, simulation.scheduler.refresh_stats().num_sessions) == (6, 0)


@pytest.mark.parametrize("num_running", [1, 2])
def test_memory_comes_when_there_is_some(num_running: int) -> None:
    simulation = Simulation(num_blocks=[40], grow=lambda number: number, max_num_seqs=num_running)
    for number in range(4):
        simulation.add(range(number, number + 13), max_tokens=2)
    simulation.run()
    assert simulation.num_preemptions == 0
    assert simulation.blocks.pools[0].num_open <= 4 * 4
