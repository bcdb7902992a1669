"""Several choices of one prompt: they share its work and its blocks, and end one by one."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.attention.cache_spec import CacheSpec
from tests.engine.all_works import works_of
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.jobs import MadeUpConstraint
from tests.engine.requests import Simulation, full_spec, oracle, recurrent_spec, token_ids_of, window_spec


def num_computed(simulation: Simulation) -> int:
    """Tokens computed until all is over."""
    total = 0
    while simulation.live:
        simulation.step()
        check_books(simulation)
        total += sum(work.num_tokens for work in works_of(simulation.plan))
    check_nothing_is_left(simulation)
    return total


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_prompt_is_computed_once(enable_prefix_caching: bool) -> None:
    simulation = Simulation(num_blocks=[40], enable_prefix_caching=enable_prefix_caching)
    job = simulation.add(range(18), max_tokens=5, n=4, temperature=1.0)
    assert len({tuple(job.output(index)) for index in range(4)}) == 4
    # The prompt, its last token once more for each further choice, and four output tokens each.
    assert num_computed(simulation) == 18 + 3 + 4 * 4


def test_choices_share_the_prompt_s_blocks() -> None:
    simulation = Simulation(num_blocks=[40])
    simulation.add(range(18), max_tokens=5, n=4, temperature=1.0)
    simulation.step()
    tables = [seq.block_tables[0] for seq in simulation.running]
    assert len(tables) == 4 and all(table[:4] == tables[0][:4] for table in tables)
    assert len({table[4] for table in tables}) == 4
    assert simulation.scheduler.refresh_stats().num_referenced_blocks == 4 + 4


@pytest.mark.parametrize(
    ("specs", "num_blocks", "max_num_seqs"),
    [
        ([full_spec()], 40, 2),  # no slots
        ([full_spec()], 7, 8),  # no blocks
        ([full_spec(), window_spec(3)], 12, 8),  # the window has moved on
        ([recurrent_spec(8)], 8, 8),  # a state cannot go back
    ],
    ids=["slots", "blocks", "window", "recurrent"],
)
def test_choices_that_cannot_begin_at_once_wait(specs: list[CacheSpec], num_blocks: int, max_num_seqs: int) -> None:
    simulation = Simulation(specs, [num_blocks] * len(specs), max_num_seqs=max_num_seqs, max_model_len=28)
    simulation.add(range(19), max_tokens=6, n=5, temperature=1.0)
    # With states, the prompt's first 16 tokens are a step of their own.
    for _ in range(1 + any(spec.has_snapshots for spec in specs)):
        simulation.step()
    assert len(simulation.running) + len(simulation.waiting) == 5 and simulation.waiting
    num_computed(simulation)


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    simulation = Simulation()
    simulation.add([7], max_tokens=5, n=3, temperature=1.0)
    assert num_computed(simulation) == 3 + 3 * 4


@pytest.mark.parametrize("is_draft", [True, False])
def test_draft_tokens_with_the_first_token_do_not_get_into_the_others(is_draft: bool) -> None:
    simulation = Simulation([window_spec(30)], [40], speculation=oracle(0.8, is_draft=is_draft))
    simulation.add(range(18), max_tokens=12, n=4, temperature=1.0)
    num_computed(simulation)
    assert simulation.tally["draft tokens accepted"] > 5


def test_a_choice_is_stopped_alone() -> None:
    simulation = Simulation(num_blocks=[40])
    simulation.add(range(9), max_tokens=9, n=3, temperature=1.0)
    simulation.step()
    simulation.abort(choices=[("r1", 1), ("r1", 1), ("r1", 7)])
    check_books(simulation)
    assert {seq.choice_index for seq in simulation.running} == {0, 2}
    deltas = simulation.run()["r1"]
    assert {delta.choice_index for delta in deltas} == {0, 2}
    check_nothing_is_left(simulation)


@pytest.mark.parametrize("first", [0, 1])
def test_a_choice_is_stopped_before_the_prompt_is_computed(first: int) -> None:
    """Though it is the one that the others are to come from: of itself there is no news."""
    simulation = Simulation(budget=5)
    simulation.add(range(9), max_tokens=4, n=2, temperature=1.0)
    simulation.abort(choices=[("r1", first)])
    deltas = simulation.run()["r1"]
    assert {delta.choice_index for delta in deltas} == {1 - first}
    check_nothing_is_left(simulation)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_with_its_last_choice_a_request_is_over_at_once(num_steps: int) -> None:
    simulation = Simulation(budget=5)
    simulation.add(range(9), max_tokens=4, n=3, temperature=1.0)
    for _ in range(num_steps):
        simulation.step()
    simulation.abort(choices=[("r1", index) for index in (2, 0, 1)])
    assert not simulation.scheduler.has_work
    check_nothing_is_left(simulation)


def test_of_a_beam_search_no_choice_can_be_stopped() -> None:
    simulation = Simulation()
    simulation.add(range(9), max_tokens=4, n=2, use_beam_search=True)
    simulation.step()
    simulation.abort(choices=[("r1", 0), ("r1", 1)])
    assert [delta.choice_index for delta in simulation.run()["r1"]] == [0, 1]


def test_a_prompt_that_fails_fails_for_every_choice() -> None:
    simulation = Simulation()
    simulation.add(range(9), max_tokens=4, n=3, fails=(0, 0))
    simulation.abort(choices=[("r1", 1)])
    deltas = simulation.run()["r1"]
    assert [(delta.choice_index, delta.finish_reason, delta.error) for delta in deltas] == [
        (0, "error", "made up"),
        (2, "error", "made up"),
    ]
    check_nothing_is_left(simulation)


@pytest.mark.parametrize("speculation", [None, oracle(1.0, num_tokens=5)])
@pytest.mark.parametrize("fails", [(0, 1), (1, 0), (2, 3)])
def test_later_a_choice_fails_alone(fails: tuple[int, int], speculation: Any) -> None:
    """Also the first one, with the tokens of the very step that the others come from."""
    simulation = Simulation(num_blocks=[40], speculation=speculation)
    simulation.jobs.clear()
    simulation.add(range(9), max_tokens=6, n=3, temperature=1.0, fails=fails)
    deltas = simulation.run()["r1"]
    assert [delta.choice_index for delta in deltas if delta.error] == [fails[0]]
    assert len(token_ids_of(deltas, fails[0])) == fails[1]
    check_nothing_is_left(simulation)


@pytest.mark.parametrize("spec", [{}, {"fails_in_mask": 0}, {"fails_in_mask": 3}, {"fails_in_accept": 1}])
def test_each_choice_has_a_constraint_of_its_own(spec: dict[str, int]) -> None:
    simulation = Simulation(num_blocks=[40])
    simulation.add(range(9), max_tokens=6, n=3, temperature=1.0, constraint=spec)
    well = simulation.add(range(9), max_tokens=6)
    deltas = simulation.run()
    assert [delta.finish_reason for delta in deltas["r1"] if delta.finish_reason] == (
        ["error"] if spec else ["length"]
    ) * 3
    assert all("constraint of this request failed: made up" in (delta.error or "made up") or not delta.error
               for delta in deltas["r1"])  # fmt: skip
    assert token_ids_of(deltas["r2"]) == well.output_token_ids
    check_nothing_is_left(simulation)


@pytest.mark.parametrize(
    ("spec", "reason", "num_tokens"),
    [
        ({"completes": 2}, "stop", 2),
        ({"completes": 4}, "stop", 4),
        ({"fails_in_accept": 3}, "error", 3),
        ({"fails_in_accept": 4}, "length", 4),
    ],
    ids=str,
)
def test_a_constraint_ends_its_choice(spec: dict[str, int], reason: str, num_tokens: int) -> None:
    """A constraint that is complete ends it even with its last token; one that fails there is no longer needed."""
    simulation = Simulation(num_blocks=[40])
    simulation.add(range(9), max_tokens=4, min_tokens=4, n=2, temperature=1.0, constraint=spec)
    deltas = simulation.run()["r1"]
    for choice_index in range(2):
        assert len(token_ids_of(deltas, choice_index)) == num_tokens
    assert [(delta.finish_reason, delta.stop_token_id) for delta in deltas if delta.finish_reason] == [
        (reason, None)
    ] * 2
    check_nothing_is_left(simulation)


@pytest.mark.parametrize("spec", [{"fails_in_mask": 1}, {"fails_in_accept": 1}], ids=str)
def test_a_constraint_that_refuses_its_request_is_no_failure_of_the_engine(spec: dict[str, int]) -> None:
    simulation = Simulation(num_blocks=[40])
    simulation.add(range(9), max_tokens=4, constraint={**spec, "is_refused": True})
    *_, last = simulation.run()["r1"]
    assert (last.error, last.error_kind) == ("too complex", "InvalidRequestError")
    check_nothing_is_left(simulation)


def test_a_constraint_that_cannot_be_made_refuses_the_request_or_ends_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(num_blocks=[40])
    left = [2]

    def make(spec: object) -> MadeUpConstraint:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("no more")
        return MadeUpConstraint(spec)

    monkeypatch.setattr(simulation.scheduler._sequences, "_constraint_factory", make)
    job = simulation.add(range(9), max_tokens=3, n=3, temperature=1.0, constraint={})
    job.choices[2].finish_reason, job.choices[2].token_ids = "error", list(job.prompt)
    deltas = simulation.run()["r1"]
    assert [delta.error for delta in deltas if delta.choice_index == 2] == [
        "the constraint of this request failed: no more"
    ]
    with pytest.raises(ValueError, match="no more"):
        simulation.add(range(9), max_tokens=3, constraint={})
    check_nothing_is_left(simulation)


def test_prompt_logprobs_come_once_with_the_first_choice() -> None:
    simulation = Simulation(num_blocks=[8], budget=6, max_model_len=28)
    for number in range(3):
        simulation.add(range(number, number + 13), max_tokens=14, n=2, temperature=1.0, prompt_logprobs=0, logprobs=0)
    num_computed(simulation)
    assert simulation.num_preemptions > 0
