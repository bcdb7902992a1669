"""Conversations whose blocks are kept for their next request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.cache import session_store
from pagewick.engine.cache.session_store import SessionStore
from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.engine.sequence import Sequence
from pagewick.sampling_params import SamplingParams
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.requests import Simulation, full_spec, recurrent_spec, window_spec

TTL_S = 10.0


def simulation_of(*specs: CacheSpec, num_blocks: int = 20, **options: Any) -> Simulation:
    return Simulation(specs, [num_blocks] * (len(specs) or 1), session_ttl_s=TTL_S, max_num_seqs=4, **options)


def press(simulation: Simulation, count: int = 6) -> None:
    """Others come and go, one at a time, and leave nothing in the cache that nobody keeps."""
    for _ in range(count):
        start = len(simulation.jobs)
        simulation.add([(start * 11 + place * 3) % 40 for place in range(32)], max_tokens=2)
        simulation.run()
        check_books(simulation)


def num_cached_tokens(simulation: Simulation, prompt: list[int], **options: Any) -> int:
    job = simulation.add(prompt, max_tokens=1, **options)
    return simulation.run()[job.request.request_id][0].num_cached_tokens


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([full_spec()], 16),
        ([full_spec(), window_spec(5, 2)], 16),
        ([window_spec(9, 2)], 18),
        ([full_spec(), recurrent_spec(8)], 16),
        ([recurrent_spec(8)], 16),
    ],
    ids=["full", "full-window", "window", "full-recurrent", "recurrent"],
)
def test_a_conversation_is_found_again_whatever_others_did(specs: list[CacheSpec], expected: int) -> None:
    for session_id, number in (("mine", expected), (None, 0)):
        simulation = simulation_of(*specs, num_blocks=24)
        job = simulation.add(range(13), max_tokens=7, session_id=session_id)
        simulation.run()
        check_books(simulation)
        press(simulation, 25)
        following = [*range(13), *job.output_token_ids, 1, 2]
        assert num_cached_tokens(simulation, following, session_id=session_id) == number
        check_nothing_is_left(simulation)


def test_it_ends_when_its_time_is_over() -> None:
    simulation = simulation_of()
    simulation.add(range(13), max_tokens=2, session_id="mine")
    simulation.run()
    assert simulation.scheduler.refresh_stats().num_session_blocks == 3
    simulation.now += TTL_S - 1
    press(simulation)
    assert num_cached_tokens(simulation, [*range(13)], session_id="mine") == 12  # and begins anew
    simulation.now += TTL_S - 1
    press(simulation)
    assert simulation.scheduler.refresh_stats().num_sessions == 1
    simulation.now += 1
    press(simulation)
    assert simulation.scheduler.refresh_stats().num_sessions == 0
    assert num_cached_tokens(simulation, [*range(13)]) == 0


def test_an_idle_engine_is_told_when_the_next_session_ends() -> None:
    simulation = simulation_of()
    assert simulation.scheduler.expire_sessions() is None
    for number in range(2):
        simulation.add(range(number * 20, number * 20 + 13), max_tokens=2, session_id=str(number))
        simulation.run()
        simulation.now += 4
    assert simulation.scheduler.expire_sessions() == TTL_S - 8
    simulation.now += TTL_S - 8
    assert simulation.scheduler.expire_sessions() == 4
    assert simulation.scheduler.refresh_stats().num_sessions == 1
    simulation.now += 5
    assert simulation.scheduler.expire_sessions() is None
    stats = simulation.scheduler.refresh_stats()
    assert (stats.num_sessions, stats.num_session_blocks) == (0, 0)


def test_sessions_end_before_anybody_gives_way_the_oldest_first() -> None:
    simulation = simulation_of(num_blocks=12)
    for number in range(2):
        simulation.add(range(number * 20, number * 20 + 13), max_tokens=2, session_id=str(number))
        simulation.run()
    assert simulation.scheduler.refresh_stats().num_session_blocks == 6
    simulation.add([7] * 13, max_tokens=20)  # 8 blocks: two more than there are without an end
    simulation.run()
    stats = simulation.scheduler.refresh_stats()
    assert (stats.num_sessions, stats.num_preemptions) == (1, 0)
    assert num_cached_tokens(simulation, [*range(20, 33)]) == 12
    # Also for one that only starts.
    simulation.add([8] * 40, max_tokens=1)
    simulation.run()
    assert simulation.scheduler.refresh_stats().num_sessions == 0


def test_they_do_not_end_for_somebody_who_cannot_start_anyway() -> None:
    simulation = simulation_of(num_blocks=16)
    simulation.add(range(13), max_tokens=2, session_id="mine")
    simulation.run()
    stream = simulation.add([7] * 20, max_tokens=10)
    simulation.step()
    simulation.add([9] * 50, max_tokens=1)  # 13 blocks, and the stream has 6 of 16
    simulation.step()
    assert simulation.scheduler.refresh_stats().num_sessions == 1
    while stream.request.request_id in simulation.live:
        simulation.step()
    simulation.run()
    assert simulation.scheduler.refresh_stats().num_sessions == 1  # there is room for both then
    check_nothing_is_left(simulation)


def test_a_session_is_its_user_s_own() -> None:
    simulation = simulation_of(num_blocks=40)
    who = [{}, {"fairness_key": "a"}, {"cache_salt": "s"}, {"fairness_key": "b", "cache_salt": "s"}]
    for options in who * 2:
        simulation.add(range(9), max_tokens=2, session_id="same name", **options)
        simulation.run()
        check_books(simulation)
    assert simulation.scheduler.refresh_stats().num_sessions == len(who)


def test_only_the_last_request_of_a_conversation_is_kept_with_all_its_choices() -> None:
    simulation = simulation_of(num_blocks=40)
    first = simulation.add(range(9), max_tokens=9, n=3, temperature=1.0, session_id="mine")
    simulation.run()
    check_books(simulation)
    assert simulation.scheduler.refresh_stats().num_session_blocks == 2 + 3 * 2
    for choice in first.choices:
        assert num_cached_tokens(simulation, [*choice.token_ids, 1]) == 16
    simulation.add([5] * 9, max_tokens=1, session_id="mine")
    simulation.run()
    assert simulation.scheduler.refresh_stats().num_session_blocks == 2


def test_a_beam_search_keeps_its_last_beams_and_no_others() -> None:
    simulation, num_kept = simulation_of(num_blocks=40), 0
    pin = simulation.blocks.pin

    def counted(seq: Sequence) -> list[list[bytes]]:
        nonlocal num_kept
        num_kept += 1
        return pin(seq)

    simulation.blocks.pin = counted  # type: ignore[method-assign]
    simulation.add(range(9), max_tokens=25, n=3, use_beam_search=True, session_id="mine")
    simulation.run()
    check_books(simulation)
    assert 1 <= num_kept <= 3
    check_nothing_is_left(simulation)


def test_who_computed_what_another_had_already_keeps_it_too() -> None:
    """Two at the same time: only one's blocks are known by their names, and they must stay for the other's session."""
    simulation = simulation_of(num_blocks=24)
    for session_id in (None, "mine"):
        simulation.add(range(13), max_tokens=2, session_id=session_id)
    simulation.run()
    press(simulation)
    assert num_cached_tokens(simulation, [*range(13)]) == 12


def test_what_is_wrong_is_not_kept() -> None:
    simulation = simulation_of()
    simulation.add(range(13), max_tokens=5, session_id="mine", fails=(0, 2))
    simulation.run()
    check_books(simulation)
    assert simulation.scheduler.refresh_stats().num_session_blocks == 0
    assert num_cached_tokens(simulation, [*range(13)]) == 0


def test_there_are_no_more_sessions_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "MAX_SESSIONS", 3)
    simulation = simulation_of(num_blocks=60)
    for number in range(5):
        simulation.add([number] * 9, max_tokens=1, session_id=str(number))
        simulation.run()
    assert simulation.scheduler.refresh_stats().num_sessions == 3
    assert simulation.scheduler.refresh_stats().num_session_blocks == 6


def test_without_prefix_caching_a_session_keeps_nothing() -> None:
    simulation = simulation_of(enable_prefix_caching=False, host=[8])
    simulation.add(range(13), max_tokens=2, session_id="mine")
    simulation.run()
    assert simulation.scheduler.refresh_stats().num_cached_blocks == 0


class RecordedBlocks:
    """Stands in for a block manager of one group: it pins the given keys, and records the keys that are unpinned."""

    def __init__(self, pins: list[list[bytes]]) -> None:
        self._pins = iter(pins)
        self.unpinned: list[list[bytes]] = []

    def pin(self, seq: object) -> list[list[bytes]]:
        return [next(self._pins)]

    def unpin(self, keys: list[list[bytes]]) -> None:
        self.unpinned += keys


def test_blocks_are_unpinned_in_the_order_of_their_sequence() -> None:
    """Unpinned blocks are evicted in this order, which must not depend on the hashes of their keys."""
    first, second = ([b"%d" % number for number in range(start, start + 50)] for start in (0, 25))
    blocks = RecordedBlocks([first, second, second])
    sessions = SessionStore(blocks, 60.0)  # type: ignore[arg-type]
    for arrival in (0, 0, 1):
        options = RequestOptions(session_id="s")
        request = EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(), seed=0, options=options)
        sessions.keep(SimpleNamespace(request=request, arrival=arrival), 0.0)  # type: ignore[arg-type]
    both_choices = [*first, *second[25:]]
    assert blocks.unpinned == [second[:25], both_choices]
