"""Decisions of the scheduler in situations chosen by hand; test_scheduler_machine.py finds the others."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.engine.batch import SlotWork
from tests.engine.all_works import works_of
from tests.engine.books import check_books
from tests.engine.jobs import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.engine.requests import Simulation, full_spec, recurrent_spec, token_ids_of, window_spec


def scheduled(simulation: Simulation) -> list[tuple[int, int]]:
    """Start and number of tokens of each work of the next step, which is taken."""
    return [(work.start, work.num_tokens) for work in works_of_next_step(simulation)]


def works_of_next_step(simulation: Simulation) -> list[SlotWork]:
    simulation.step()
    check_books(simulation)
    return works_of(simulation.plan)


def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end() -> None:
    simulation = Simulation(budget=7)
    simulation.add(range(17), max_tokens=2)
    works = [works_of_next_step(simulation)[0] for _ in range(4)]
    assert [(work.start, work.num_tokens, work.is_sampled) for work in works] == [
        (0, 7, False),
        (7, 7, False),
        (14, 3, True),
        (17, 1, True),
    ]
    assert [work.token_ids for work in works] == [[*range(7)], [*range(7, 14)], [14, 15, 16], None]
    assert not simulation.scheduler.has_work


def test_a_long_prompt_does_not_hold_up_a_running_stream() -> None:
    simulation = Simulation(budget=8)
    simulation.add(range(4), max_tokens=5)
    assert scheduled(simulation) == [(0, 4)]
    simulation.add(range(10, 30), max_tokens=1)
    assert scheduled(simulation) == [(4, 1), (0, 7)]
    assert scheduled(simulation) == [(5, 1), (7, 7)]
    # Also where the prompt is before it in the order.
    simulation = Simulation(budget=8)
    simulation.add(range(4), max_tokens=5, priority=1)
    simulation.step()
    simulation.add(range(10, 30), max_tokens=1)
    assert scheduled(simulation) == [(4, 1), (0, 7)]
    assert scheduled(simulation) == [(5, 1), (7, 7)]


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    simulation = Simulation(max_num_seqs=1)
    for prompt, priority in (([1], 0), ([2], 1), ([3], 0), ([4], -1)):
        simulation.add(prompt, priority=priority, max_tokens=1, temperature=1.0)
    order = [delta.request_id for _ in range(4) for delta in simulation.step()]
    assert order == ["r4", "r1", "r3", "r2"]


def test_when_blocks_run_out_the_last_in_the_order_gives_its_own_back() -> None:
    simulation = Simulation(num_blocks=[6], enable_prefix_caching=False)
    simulation.add(range(8), max_tokens=8)
    simulation.add(range(20, 28), max_tokens=8, priority=-1)
    simulation.add(range(30, 32), max_tokens=8)
    while simulation.num_preemptions == 0:
        simulation.step()
    assert [seq.request_id for seq in simulation.running] == ["r2", "r1"]
    assert [seq.request_id for seq in simulation.waiting] == ["r3"]
    simulation.run()


def test_a_prompt_starts_when_there_is_room_for_all_of_it() -> None:
    """Though its first chunk would fit: it would only be preempted again."""
    simulation = Simulation(num_blocks=[6], budget=5, enable_prefix_caching=False)
    simulation.add(range(13), max_tokens=2)
    for _ in range(3):
        simulation.step()
    simulation.add(range(9), max_tokens=1)
    simulation.add([1], max_tokens=1)
    assert scheduled(simulation) == [(13, 1)]
    assert scheduled(simulation) == [(0, 5)]
    assert simulation.num_preemptions == 0


def test_who_is_preempted_loses_the_work_that_was_planned_for_it() -> None:
    simulation = Simulation(num_blocks=[6], budget=8, enable_prefix_caching=False)
    stream = simulation.add(range(7), max_tokens=9, priority=1)
    assert scheduled(simulation) == [(0, 7)]
    prompt = simulation.add(range(20, 36), max_tokens=1)
    assert scheduled(simulation) == [(7, 1), (0, 7)]
    # The stream has its third block already when the prompt, which goes before it, needs two and finds one.
    assert scheduled(simulation) == [(7, 7)]
    assert simulation.num_preemptions == 1
    deltas = simulation.run()
    assert token_ids_of(deltas["r2"]) == prompt.output_token_ids
    assert token_ids_of(deltas["r1"]) == stream.output_token_ids[2:]


@pytest.mark.parametrize("budget", range(2, 13))
def test_a_preempted_sequence_takes_up_where_it_was(budget: int) -> None:
    """Whatever is left for the last chunk: a single token too, which its new slot has never sampled."""
    simulation = Simulation(num_blocks=[5], budget=budget, max_num_seqs=2, enable_prefix_caching=False)
    jobs = [
        simulation.add(range(5), max_tokens=9, temperature=1.0),
        simulation.add(range(6), max_tokens=9, temperature=1.0),
    ]
    deltas = simulation.run()
    assert simulation.num_preemptions > 0
    for job in jobs:
        assert token_ids_of(deltas[job.request.request_id]) == job.output_token_ids


def test_short_requests_do_not_keep_a_long_one_from_its_aligned_chunk() -> None:
    """Seven streams leave it four tokens where it needs eight; newcomers must not take their places for ever."""
    simulation = Simulation([recurrent_spec(chunk_alignment=8)], [64], max_num_seqs=16, budget=11)
    simulation.add(range(4), max_tokens=1)
    simulation.run()
    long = simulation.add(range(40), max_tokens=1)
    for number in range(60):
        for _ in range(4):
            simulation.add([number % VOCAB_SIZE], max_tokens=5)
        for delta in simulation.step():
            if delta.request_id == long.request.request_id:
                assert delta.num_cached_tokens == 4
                return
    pytest.fail("the long request starves")


def test_every_spec_alone_and_together_gives_blocks_back() -> None:
    specs = [window_spec(lookback=5), recurrent_spec(block_size=8, chunk_alignment=8)]
    simulation = Simulation(specs, [8, 8], budget=16, max_model_len=200)
    job = simulation.add([1, 2, 3] * 20, max_tokens=100)
    assert token_ids_of(simulation.run()[job.request.request_id]) == job.output_token_ids
    assert [pool.num_referenced for pool in simulation.blocks.pools] == [0, 0]


@pytest.mark.parametrize("max_tokens", [1, 3, None])
def test_generation_ends_with_max_tokens_or_the_context(max_tokens: int | None) -> None:
    simulation = Simulation(max_model_len=12)
    simulation.add(range(5), max_tokens=max_tokens)
    deltas = simulation.run()
    assert len(token_ids_of(deltas["r1"])) == (max_tokens or 7)
    assert deltas["r1"][-1].finish_reason == "length"


def test_a_stop_token_ends_generation_and_is_reported() -> None:
    simulation = Simulation()
    free = simulation.add([1, 2, 3], max_tokens=20)
    simulation.run()
    stop = next(token_id for token_id in free.output_token_ids[4:] if token_id not in free.output_token_ids[:4])
    place = free.output_token_ids.index(stop)
    simulation.add([1, 2, 3], max_tokens=20, stop_token_ids=[stop], request_id="stopped")
    deltas = simulation.run()["stopped"]
    assert token_ids_of(deltas) == free.output_token_ids[: place + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == ("stop", stop)
    # On the very last token, the stop token is the reason, not the length.
    simulation.add([1, 2, 3], max_tokens=place + 1, stop_token_ids=[stop], request_id="both")
    assert simulation.run()["both"][-1].finish_reason == "stop"
    # Before min_tokens it cannot be sampled.
    simulation.add([1, 2, 3], max_tokens=20, min_tokens=place + 1, stop_token_ids=[stop], request_id="later")
    assert len(token_ids_of(simulation.run()["later"])) > place + 1


def test_end_of_sequence_tokens_end_it_unless_ignored() -> None:
    prompts = [[first, second] for first in range(10) for second in range(10)]
    simulation = Simulation(max_model_len=64)
    for prompt in prompts:
        simulation.add(prompt, ignore_eos=False, max_tokens=60)
        deltas = next(iter(simulation.run().values()))
        if deltas[-1].finish_reason == "stop":
            break
    assert deltas[-1].stop_token_id in EOS_TOKEN_IDS
    assert set(EOS_TOKEN_IDS).isdisjoint(token_ids_of(deltas)[:-1])
    simulation.add(prompt, ignore_eos=True, max_tokens=60, request_id="on")
    assert len(token_ids_of(simulation.run()["on"])) == 60


def test_abort_frees_everything_in_whatever_state() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add(range(9), max_tokens=9)
    simulation.add(range(9), max_tokens=9)
    simulation.step()
    simulation.abort(["r1", "r2", "r1", "unknown"])
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.refresh_stats().num_referenced_blocks == 0
    # While a step is being computed: its result is for nobody.
    simulation.add(range(9), max_tokens=9)
    step = simulation.scheduler.schedule()
    assert step is not None
    output = simulation.runner.submit(step.plan)
    simulation.scheduler.abort(["r3"])
    assert simulation.scheduler.update(output) == []
    simulation.live.clear()
    assert simulation.scheduler.refresh_stats().num_referenced_blocks == 0
    # The id can be used again.
    simulation.add(range(9), max_tokens=1, request_id="r3")
    assert len(simulation.run()["r3"]) == 1


def test_a_failure_is_one_request_s_own_and_serves_nobody_as_a_prefix() -> None:
    simulation = Simulation()
    simulation.add(range(9), max_tokens=3, fails=(0, 0))
    well = simulation.add(range(20, 29), max_tokens=3)
    deltas = simulation.run()
    assert [(delta.finish_reason, delta.error) for delta in deltas["r1"]] == [("error", "made up")]
    assert token_ids_of(deltas["r2"]) == well.output_token_ids
    assert simulation.scheduler.refresh_stats().num_referenced_blocks == 0
    simulation.add(range(9), max_tokens=1)
    simulation.add(range(20, 29), max_tokens=1)
    deltas = simulation.run()
    assert [deltas[request_id][0].num_cached_tokens for request_id in ("r3", "r4")] == [0, 8]


def test_statistics() -> None:
    simulation = Simulation(num_blocks=[5], max_num_seqs=1)
    for _ in range(2):
        simulation.add(range(9), max_tokens=2)
    simulation.step()
    stats = simulation.scheduler.refresh_stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert (stats.num_referenced_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (3, 0, 2)
    simulation.run()
    stats = simulation.scheduler.refresh_stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert (stats.num_referenced_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (0, 2, 3)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (18, 4, 4)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_preemptions) == (18, 8, 0)


def test_prompts_get_smaller_chunks_beside_streams() -> None:
    simulation = Simulation(num_blocks=(64,), budget=40, max_num_prefill_tokens=10, max_model_len=200)

    def step() -> list[int]:
        simulation.step()
        return [work.num_tokens for work in works_of(simulation.plan)]

    simulation.add([1] * 100, max_tokens=1)
    assert [step() for _ in range(3)] == [[40], [40], [20]]
    simulation.add([2, 3], max_tokens=20)
    step()
    simulation.add([4] * 25, max_tokens=1)
    assert [step() for _ in range(3)] == [[1, 10], [1, 10], [1, 5]]


@pytest.mark.parametrize(
    ("options", "is_stream"),
    [
        ({}, True),
        ({"logprobs": 2, "temperature": 1.0, "mirostat": 2}, True),
        ({"stop_token_ids": (3,), "min_tokens": 2, "ignore_eos": False}, True),
        ({"constraint": {}}, False),
        ({"use_beam_search": True, "n": 2}, False),
    ],
    ids=str,
)
def test_sequences_that_only_sample_one_token_after_another_are_streams(
    options: dict[str, Any], is_stream: bool
) -> None:
    simulation = Simulation()
    simulation.add(range(6), max_tokens=6, **options)
    simulation.step()
    assert simulation.plan.work and not simulation.plan.streams.slots
    simulation.step()
    assert bool(simulation.plan.streams.slots) == is_stream != bool(simulation.plan.work)
    simulation.run()


def test_only_streams_at_the_end_of_a_block_get_one() -> None:
    simulation = Simulation([full_spec(4)], num_blocks=[40])
    for number in range(3):
        simulation.add(range(10 * number, 10 * number + 4 + number), max_tokens=9)
    simulation.step()
    for step in range(8):
        simulation.step()
        streams = simulation.plan.streams
        with_blocks = [start for start in streams.starts if start % 4 == 0]
        assert [streams.starts[place] for place in streams.new_block_ids] == with_blocks
        assert len(streams.starts) == 3, step
    simulation.run()


def test_a_stream_that_gives_way_is_taken_out_of_the_plan() -> None:
    simulation = Simulation([full_spec(4)], num_blocks=[40], max_num_seqs=2)
    for priority in (1, 2):
        simulation.add(range(priority, priority + 6), max_tokens=9, priority=priority)
    for _ in range(3):
        simulation.step()
    simulation.add(range(30, 36), max_tokens=3, priority=0)
    simulation.step()
    assert simulation.num_preemptions == 1
    assert [work.num_tokens for work in works_of(simulation.plan)] == [1, 6]
    simulation.run()
