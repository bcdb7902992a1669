"""max_tokens 0: the prompt is computed and told about, and nothing is sampled. And how long what took."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagewick.engine.batch import StepOutput, StepPlan
from pagewick.engine.messages import ITERATION_TOKEN_BOUNDS, EngineStats, TokenLogprobs
from pagewick.engine.scheduling.queue_limits import QueueLimits
from tests.engine.requests import Simulation, full_spec, oracle, recurrent_spec, window_spec

PROMPT = [*range(10, 27)]  # 17 tokens


@pytest.mark.parametrize("budget", [1, 5, 16, 17, 64])
def test_the_prompt_is_computed_in_chunks_and_its_logprobs_are_told(budget: int) -> None:
    simulation = Simulation(budget=budget)
    job = simulation.add(PROMPT, max_tokens=0, prompt_logprobs=0, logprobs=0)
    deltas = simulation.run()["r1"]
    assert [one for delta in deltas for one in delta.prompt_logprobs or []] == job.prompt_logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert not any(delta.token_ids or delta.logprobs for delta in deltas)
    assert simulation.tally["steps"] == math.ceil(len(PROMPT) / budget)
    assert simulation.scheduler.stats.generation_tokens == 0


def test_a_prompt_may_fill_the_context() -> None:
    simulation = Simulation(num_blocks=(5,), max_model_len=20)
    simulation.add([*range(20)], max_tokens=0)
    (delta,) = simulation.run()["r1"]
    assert delta.finish_reason == "length"


def test_every_choice_ends_empty_and_the_prompt_is_computed_once() -> None:
    simulation = Simulation(budget=64)
    simulation.add(PROMPT, max_tokens=0, n=3, temperature=1.0)
    deltas = simulation.run()["r1"]
    assert [(delta.choice_index, delta.finish_reason, delta.token_ids) for delta in deltas] == [
        (index, "length", []) for index in range(3)
    ]
    assert simulation.tally["steps"] == 1


def test_choices_that_were_stopped_are_not_told() -> None:
    simulation = Simulation(budget=8)
    simulation.add(PROMPT, max_tokens=0, n=3, temperature=1.0)
    simulation.step()
    simulation.abort(choices=[("r1", 1)])
    assert [delta.choice_index for delta in simulation.run()["r1"]] == [0, 2]


@pytest.mark.parametrize("spec", [full_spec(), window_spec(6), recurrent_spec()])
def test_what_it_computed_serves_the_next_one(spec: Any) -> None:
    simulation = Simulation([spec], budget=8)
    simulation.add(PROMPT, max_tokens=0, session_id="warm")
    simulation.run()
    assert simulation.scheduler.refresh_stats().num_sessions == 1
    simulation.add(PROMPT, max_tokens=2)
    deltas = simulation.run()["r2"]
    assert deltas[0].num_cached_tokens == 16
    simulation.add(PROMPT, max_tokens=0)
    (delta,) = simulation.run()["r3"]
    assert delta.num_cached_tokens == 16 and delta.finish_reason == "length"


def test_one_that_is_preempted_says_everything_once() -> None:
    simulation = Simulation(num_blocks=(7,), budget=4, max_model_len=28)
    job = simulation.add(PROMPT, max_tokens=0, prompt_logprobs=0, priority=1)
    for _ in range(3):
        simulation.step()
    simulation.add([*range(10, 30)], max_tokens=6)
    deltas = simulation.run()["r1"]
    assert simulation.num_preemptions > 0
    assert deltas[-1].finish_reason == "length" and len(job.prompt_logprobs) == 16  # the rest is the simulation's check


def test_it_gets_no_draft_tokens() -> None:
    simulation = Simulation(speculation=oracle(1.0), max_model_len=17)
    simulation.add(PROMPT, max_tokens=0)
    simulation.run()
    assert simulation.scheduler.stats.num_draft_tokens == 0


def test_a_constraint_is_not_asked() -> None:
    simulation = Simulation()
    simulation.add(PROMPT, max_tokens=0, constraint={"fails_in_mask": 0})
    (delta,) = simulation.run()["r1"]
    assert (delta.finish_reason, delta.error) == ("length", None)


def test_prompt_logprobs_that_are_not_numbers_are_an_error_and_serve_nobody() -> None:
    simulation = Simulation(budget=8)
    submit = simulation.runner.submit

    def poisoned(plan: StepPlan) -> StepOutput:
        output = submit(plan)
        for result in output.results:
            if result.prompt_logprobs:
                result.prompt_logprobs = [TokenLogprobs(1, math.nan, 1, []), *result.prompt_logprobs[1:]]
        return output

    simulation.add(PROMPT, max_tokens=0, prompt_logprobs=0)
    simulation.step()
    simulation.runner.submit = poisoned  # type: ignore[method-assign]
    simulation.live["r1"].job.choices[0].finish_reason = "error"
    (delta,) = simulation.run()["r1"]
    assert delta.error is not None and "not numbers" in delta.error and "try --dtype float32" in delta.error
    simulation.add(PROMPT, max_tokens=1)
    assert simulation.run()["r2"][0].num_cached_tokens == 0


# Times


def test_waiting_and_computing_the_prompt_are_told_apart() -> None:
    simulation = Simulation(max_num_seqs=1, budget=8)
    simulation.add([1, 2], max_tokens=3)
    simulation.now = 1.0
    simulation.add(PROMPT, max_tokens=2)
    found = []
    while simulation.scheduler.has_work:
        found += simulation.step()
        simulation.now += 2.0
    first = next(delta for delta in found if delta.request_id == "r1")
    # Added at 0, scheduled at 1, at which time the first token came.
    assert (first.queue_s, first.prefill_s) == (1.0, 0.0)
    second = [delta for delta in found if delta.request_id == "r2"]
    # Added at 1, scheduled when the other had ended in the step at 5; three steps for its prompt.
    assert [(delta.queue_s, delta.prefill_s) for delta in second] == [(6.0, 4.0), (0.0, 0.0)]
    # Each further token takes a step of 2 s.
    assert [delta.decode_s for delta in found] == [0.0, 2.0, 4.0, 0.0, 2.0]


def test_prompt_logprobs_come_with_the_time_waited_and_before_the_prompt_is_done() -> None:
    simulation = Simulation(budget=8)
    simulation.add(PROMPT, max_tokens=0, prompt_logprobs=0)
    found = []
    for _ in range(3):
        simulation.now += 1.5
        found += simulation.step()
    assert [(delta.queue_s, delta.prefill_s) for delta in found] == [(1.5, 0.0), (0.0, 0.0), (0.0, 3.0)]


def test_one_that_expires_waiting_has_only_waited() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add([1, 2], max_tokens=30)
    simulation.step()
    simulation.add(PROMPT, timeout_s=5.0)
    simulation.now = 8.0
    delta = next(delta for delta in simulation.step() if delta.request_id == "r2")
    assert (delta.finish_reason, delta.queue_s, delta.prefill_s) == ("error", 8.0, 0.0)


def test_a_beam_search_tells_when_its_prompt_was_done() -> None:
    simulation = Simulation()
    simulation.add(PROMPT, n=2, use_beam_search=True, max_tokens=3)
    simulation.now = 1.0
    found = []
    while simulation.scheduler.has_work:
        plan_time = simulation.now
        found += simulation.step(lambda now=plan_time: setattr(simulation, "now", now + 2.0))  # type: ignore[misc]
    assert [(delta.queue_s, delta.prefill_s) for delta in found] == [(1.0, 2.0), (0.0, 0.0)]
    assert found[0].decode_s == simulation.now - 3.0


# Tokens of a step


def test_the_tokens_of_steps_are_counted() -> None:
    simulation = Simulation(budget=8, limits=lambda: QueueLimits(4))
    simulation.add(PROMPT, max_tokens=3, n=2, temperature=1.0)
    simulation.run()
    stats = simulation.scheduler.refresh_stats()
    # 8, 8, 1 and the first token; the fork computes the last prompt token again; then the last tokens of both.
    assert stats.num_iteration_tokens == 17 + 1 + 6
    assert sum(stats.iteration_token_counts) == simulation.tally["steps"]
    assert stats.iteration_token_counts[1] >= 2  # of 8 tokens


@pytest.mark.parametrize(
    ("num_tokens", "place"), [(1, 0), (2, 1), (8, 1), (9, 2), (16384, 12), (16385, len(ITERATION_TOKEN_BOUNDS))]
)
def test_a_step_is_counted_where_prometheus_would(num_tokens: int, place: int) -> None:
    stats = EngineStats()
    stats.count_iteration(num_tokens)
    stats.count_iteration(0)
    assert [index for index, count in enumerate(stats.iteration_token_counts) if count] == [place]
    assert stats.num_iteration_tokens == num_tokens
