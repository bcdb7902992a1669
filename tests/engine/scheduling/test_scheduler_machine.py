"""Random requests, aborts, clocks, disks and shortages against scheduler and block manager, without a model.

PAGEWICK_DEEP=1 tries up to a hundred times as many histories, other ones each time.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pagewick.attention.cache_spec import CacheSpec
from pagewick.config import EngineConfig
from pagewick.engine.cache.kv_cache import CacheGroup, blocks_per_group, capacity_of
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.sequence import Sequence as TokenSequence
from pagewick.errors import ConfigError, QueueFullError
from tests.deep import IS_DEEP
from tests.engine.books import check_books, check_nothing_is_left
from tests.engine.jobs import VOCAB_SIZE
from tests.engine.requests import Simulation, full_spec, oracle, recurrent_spec, window_spec

NUM_EXAMPLES = 200 if IS_DEEP else 40  # of a round
MAX_ROUNDS = 20
FIRST_SEED = 2  # with it, the first round has every event
DOCUMENTS = [Random(number).choices(range(VOCAB_SIZE), k=64) for number in range(2)]
SESSION_TTL_S = 6.0
CONSTRAINTS: list[dict[str, int]] = [
    {}, {"fails_in_mask": 0}, {"fails_in_mask": 2}, {"fails_in_accept": 1}, {"completes": 1}, {"completes": 3},
]  # fmt: skip

Specs = list[CacheSpec]


def full_only(random: Random) -> Specs:
    return [full_spec(random.choice([1, 2, 4, 5]))]


def with_window(
    random: Random, sizes: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (4, 4), (4, 2), (2, 4), (3, 12))
) -> Specs:
    full, window = random.choice(sizes)
    return [full_spec(full), window_spec(random.randint(1, 14), window, is_chunked=random.random() < 0.3)]


def recurrent(random: Random, block_sizes: Sequence[int] = (4, 6, 8, 12)) -> CacheSpec:
    size = random.choice(block_sizes)
    return recurrent_spec(size, random.choice([1, size, size // 2]))


def with_recurrent(random: Random) -> Specs:
    return [full_spec(random.choice([1, 2])), recurrent(random)]


def every_kind(random: Random) -> Specs:
    return [recurrent(random, (4, 8)), *with_window(random, ((2, 2), (4, 4), (4, 2), (2, 4)))]


def bounded_only(random: Random) -> Specs:
    if random.random() < 0.5:
        return [recurrent(random)]
    # Not chunks: a beam that forks where one begins has no block from which the simulated model could learn its tokens.
    return [replace(spec, is_chunked=False) for spec in with_window(random)[1:]]


LAYOUTS: dict[str, Callable[[Random], Specs]] = {
    "full": full_only,
    "window": with_window,
    "recurrent": with_recurrent,
    "bounded": bounded_only,
    "all": every_kind,
}


def simulation(random: Random, layout: Callable[[Random], Specs], tally: Counter[str], depth: int) -> Simulation | None:
    """Sized by the engine's own arithmetic, from memory that is often tight; None if it has no room for anything."""
    specs = layout(random)
    groups = [CacheGroup(spec, (None,)) for spec in specs]  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"num_kv_blocks": random.randint(3, 20)}
    if random.random() < 0.5:
        sizes = {"kv_cache_memory": len(specs) * random.randint(12, 80)}
    config = EngineConfig(
        max_num_seqs=random.randint(1, 8),
        max_num_batched_tokens=random.choice([1, 2, 5, 8, 12, 17, 64]),
        max_model_len=random.randint(8, 60),
        device="cpu",
        **sizes,
    )
    try:
        num_blocks = blocks_per_group(groups, config)
    except ConfigError:
        return None
    capacity = capacity_of(groups, num_blocks, config)
    if capacity < 6:
        return None
    speculates = random.random() < 0.5
    some_sizes = [random.randint(1, 6) for _ in specs]
    return Simulation(
        specs,
        num_blocks,
        max_num_seqs=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len or capacity, capacity),
        enable_prefix_caching=random.random() < 0.85,
        host=some_sizes if random.random() < 0.4 else (),
        disk_capacity=[4 * size for size in some_sizes] if random.random() < 0.5 else (),
        grow=growth(random, tally) if random.random() < 0.4 else None,
        speculation=random_oracle(random, config.max_num_seqs) if speculates else None,
        limits=random.choice([QueueLimits, QueueLimits, lambda: QueueLimits(4, 120)]),
        session_ttl_s=SESSION_TTL_S,
        depth=depth,
    )


def growth(random: Random, tally: Counter[str]) -> Callable[[int], int]:
    """Memory that is often refused."""
    share = random.choice([0.0, 0.1, 0.6])

    def grow(number: int) -> int:
        granted = random.randint(1, number) if random.random() < share else 0
        tally["growth refused"] += granted < number
        return granted

    return grow


def random_oracle(random: Random, max_num_seqs: int) -> Any:
    return oracle(
        random.choice([0.3, 0.7, 0.9]),
        num_tokens=random.randint(1, 5),
        is_draft=random.random() < 0.5,
        max_batch=random.randint(1, 8),
        max_num_seqs=max_num_seqs,
    )


def request_values(random: Random, max_model_len: int) -> dict[str, Any]:
    length = random.choice([50, 80, 100, random.randint(0, 100)])
    num_prompt_tokens = 1 + (max_model_len - 2) * length // 100
    room = max_model_len - num_prompt_tokens
    max_tokens = random.choice([None, random.randint(1, room), random.randint(1, room)])
    min_tokens = random.choice([0, 0, 0, 2, 100])
    prompt = DOCUMENTS[random.randrange(2)][:num_prompt_tokens]
    if random.random() < 0.25:
        prompt[random.randrange(num_prompt_tokens)] = VOCAB_SIZE - 1
    values: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens or min_tokens),
        "stop_token_ids": random.choice([(), (), (5,), (9, 12)]),
        "ignore_eos": random.random() < 0.5,
        "logprobs": random.choice([None, 0]),
        "prompt_logprobs": random.choice([None] * 4 + [0]),
        "cache_salt": random.choice([None] * 6 + ["a", "b"]),
        "extra_keys": extra_keys(random, num_prompt_tokens),
        "priority": random.choice([0, 0, 0, 1, -1]),
        "fairness_key": random.choice(["", "", "one", "two"]),
        "session_id": random.choice([None, None, "conversation"]),
        "timeout_s": random.choice([None] * 5 + [5.0, 30.0]),
        "fails": (random.randrange(3), random.choice([0, 1, 2])) if random.random() < 0.1 else None,
    }
    if random.random() < 0.15:
        beams = {"length_penalty": random.choice([1.0, 0.0, 2.0, -1.0]), "early_stopping": random.random() < 0.3}
        return {**values, **beams, "n": random.randint(1, 3), "use_beam_search": True}
    if random.random() < 0.1:
        longest = random.choice([prompt, [*prompt, *DOCUMENTS[0]][:max_model_len]])
        values |= {"prompt_token_ids": longest, "max_tokens": 0, "min_tokens": 0}
    values["n"] = random.choice([1, 1, 2, 3, 4])
    values["temperature"] = random.choice([0.0, 0.8])
    values |= random.choice([{}, {}, {"mirostat": 2}, {"repetition_penalty": 1.1}])
    if random.random() < 0.1:
        values["constraint"] = random.choice(CONSTRAINTS)
    return values


def extra_keys(random: Random, num_prompt_tokens: int) -> list[tuple[int, int, bytes]]:
    """Mostly none; few enough different ones that some requests have the same."""
    ranges = [(0, 2**31 - 1, b"adapter")] if random.random() < 0.05 else []
    if random.random() < 0.1:
        start = random.choice([0, num_prompt_tokens // 2, num_prompt_tokens - 1])
        ranges.append((start, start + random.choice([1, 6]), random.choice([b"one", b"two"])))
    return ranges


class SchedulerMachine(RuleBasedStateMachine):
    layout: Callable[[Random], Specs]
    tally: Counter[str]
    depth: int
    is_sound = False

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        found = simulation(Random(seed), type(self).layout, self.tally, self.depth)
        assume(found is not None)
        assert found is not None
        self.simulation = found
        found.tally = found.runner.tally = self.tally
        self._watch()
        self.is_sound = True

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 3))
    def add(self, seed: int, count: int) -> None:
        random = Random(seed)
        for _ in range(count):
            self._add(request_values(random, self.simulation.max_model_len))
        check_books(self.simulation)

    @precondition(lambda self: self.simulation.jobs)
    @rule(seed=st.integers(0, 2**32))
    def go_on(self, seed: int) -> None:
        """A conversation: what an earlier request was asked and gave, and one more token."""
        random, simulation = Random(seed), self.simulation
        job = simulation.jobs[random.choice(sorted(simulation.jobs))]
        values = request_values(random, simulation.max_model_len)
        values["prompt_token_ids"] = [*job.choices[0].token_ids, seed % VOCAB_SIZE][: simulation.max_model_len - 1]
        values["max_tokens"] = 1 + seed % (simulation.max_model_len - len(values["prompt_token_ids"]))
        values["min_tokens"] = 0
        options = job.request.options
        same = {"cache_salt": options.cache_salt, "session_id": options.session_id}
        self._add({**values, **same, "extra_keys": job.request.extra_keys})

    def _add(self, values: dict[str, Any]) -> None:
        try:
            self.simulation.add(**values)
        except QueueFullError as error:
            assert error.retry_after_s >= 1
            self.tally["refused"] += 1

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.simulation.live)
    @rule(seed=st.integers(0, 2**32), is_between=st.booleans(), is_choice=st.booleans())
    def abort(self, seed: int, is_between: bool, is_choice: bool) -> None:
        """A request or some of its choices, before a step or while one is being computed."""
        random, live = Random(seed), self.simulation.live
        request_id = random.choice(sorted(live))
        indexes = range(len(live[request_id].job.choices))
        choices = [(request_id, index) for index in indexes if is_choice and random.random() < 0.6]
        request_ids = [] if is_choice else [request_id, "unknown"]
        self.tally["choices aborted"] += len(choices)

        def abort() -> None:
            self.simulation.abort(request_ids, [*choices, ("unknown", 0)])

        if is_between:
            self._step(abort)
        else:
            abort()
        check_books(self.simulation)

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0]))
    def advance(self, seconds: float) -> None:
        self.simulation.now += seconds

    @precondition(lambda self: self.simulation.disk.blocks)
    @rule(seed=st.integers(0, 2**32))
    def damage(self, seed: int) -> None:
        """Some files on disk cannot be read from now on."""
        self._damage(Random(seed))

    def _damage(self, random: Random) -> None:
        disk = self.simulation.disk
        disk.damaged |= {place for place in disk.blocks if random.random() < 0.7}

    @precondition(lambda self: self.simulation.disk_capacity and self.simulation.runner.can_write)
    @rule(num_lost=st.integers(0, 3))
    def refuse(self, num_lost: int) -> None:
        """The disk takes no more blocks until a restart."""
        self.simulation.runner.refuse(num_lost)

    @precondition(lambda self: self.simulation.disk_capacity)
    @rule(is_ended=st.booleans(), is_saved=st.booleans(), is_damaged=st.booleans(), change=st.integers(-1, 1))
    def restart(self, is_ended: bool, is_saved: bool, is_damaged: bool, change: int) -> None:
        simulation = self.simulation
        if is_ended:
            self._finish()
        simulation.abort(list(simulation.live))
        while simulation.has_work:  # news of those that expired, and steps in flight
            self._step()
        if is_saved:
            assert simulation.runner.transfer(simulation.scheduler.save_cache().transfers) == []
            check_books(simulation)
        self._count()
        if is_damaged:
            self._damage(Random(len(simulation.jobs)))
        simulation.loop.close()
        simulation.disk_capacity = [max(1, number + change) for number in simulation.disk_capacity]
        simulation.restart()
        self._watch()
        self.tally["restarts"] += 1

    def teardown(self) -> None:
        if self.is_sound:
            self._finish()
            self._count()
            check_nothing_is_left(self.simulation)
        if hasattr(self, "simulation"):
            self.simulation.loop.close()

    def _finish(self) -> None:
        # The first sequence in the order advances with every step, or those before it in the plan finish. A preempted
        # sequence starts again. Each block on disk may be unreadable once.
        live = self.simulation.live.values()
        limit = 4 * sum(expected.job.num_steps for expected in live) + len(live) + len(self.simulation.disk.blocks) + 1
        # One that sits out beside steps in flight advances with the next.
        limit *= self.depth
        while self.simulation.has_work:
            assert limit > 0, "someone starves"
            self._step()
            limit -= 1

    def _step(self, between: Callable[[], None] | None = None) -> None:
        self.is_sound = False  # until the step is over: what has failed is not asked again
        deltas = self.simulation.step(between)
        if self.depth == 1:  # beside steps in flight, deadlines are looked at when the next step is scheduled
            assert not any(one.deadline is not None and one.deadline <= self.simulation.now for one in self._live())
        check_books(self.simulation)
        stats = self.simulation.scheduler.stats
        self.tally["sessions kept"] += stats.num_session_blocks > 0
        self.tally["finished"] += sum(delta.finish_reason is not None for delta in deltas)
        self.tally["prompts only"] += sum(
            delta.finish_reason == "length" and not delta.token_ids and delta.cumulative_logprob is None
            for delta in deltas
        )
        self.tally["beams"] += sum(delta.cumulative_logprob is not None for delta in deltas)
        self.tally["failures"] += sum(delta.error_kind == "EngineError" and delta.error is not None for delta in deltas)
        self.tally["hits"] += sum(delta.finish_reason is not None and delta.num_cached_tokens > 0 for delta in deltas)
        self.tally["misses explained"] += sum(delta.prefix_miss is not None for delta in deltas)
        self.is_sound = True

    def _live(self) -> list[Any]:
        return list(self.simulation.live.values())

    def _count(self) -> None:
        stats = self.simulation.scheduler.refresh_stats()
        self.tally["preemptions"] += stats.num_preemptions
        self.tally["expired"] += stats.num_expired

    def _watch(self) -> None:
        """Count what cannot be seen from outside."""
        sequences, blocks, tally = self.simulation.scheduler._sequences, self.simulation.blocks, self.tally
        victims_for, fork = sequences.victims_for, blocks.fork

        def counted_victims(*arguments: Any) -> list[TokenSequence] | None:
            victims = victims_for(*arguments)
            tally["displaced"] += len(victims or ())
            return victims

        def counted_fork(*arguments: Any) -> bool:
            has_forked = fork(*arguments)
            tally["forks" if has_forked else "forks put off"] += 1
            return has_forked

        sequences.victims_for = counted_victims  # type: ignore[method-assign]
        blocks.fork = counted_fork  # type: ignore[method-assign]
        for pool in blocks.pools:
            pool._on_evict = counted(pool._on_evict, "evictions", tally)


def counted(function: Any, name: str, tally: Counter[str]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        tally[name] += 1
        return function(*arguments)

    return call


EVENTS = (
    "preemptions", "evictions", "hits", "forks", "forks put off", "displaced", "sessions kept", "expired", "refused",
    "growth refused", "beams", "prompts only", "failures", "choices aborted", "misses explained", "HOST to DEVICE",
    "DISK to DEVICE", "DEVICE to DISK", "HOST to DISK", "DISK to DISK", "DEVICE to DEVICE", "unreadable", "restarts",
    "blocks refused", "draft tokens accepted", "draft tokens rejected",
)  # fmt: skip


@pytest.fixture
def same_histories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Hypothesis draw no constants of the modules that happen to be loaded, which differ with the tests before."""
    constants = providers.Constants()
    monkeypatch.setattr(providers, "_get_local_constants", lambda: constants)
    providers.CONSTANTS_CACHE.cache.clear()
    yield
    providers.CONSTANTS_CACHE.cache.clear()


def is_enough(tally: Counter[str]) -> bool:
    return tally["steps"] > 4000 and tally["finished"] > 500


@pytest.mark.usefixtures("same_histories")
@pytest.mark.timeout(0 if IS_DEEP else 300)
@pytest.mark.parametrize(
    ("name", "depth"),
    # Two steps in flight are the more common case, and the harder one.
    [*itertools.product(LAYOUTS, [1, 2, 3])] if IS_DEEP else [*itertools.product(LAYOUTS, [2]), ("recurrent", 1)],
)
def test_any_history_gives_every_request_what_it_gets_alone(name: str, depth: int) -> None:
    tally: Counter[str] = Counter()
    given = {"layout": staticmethod(LAYOUTS[name]), "tally": tally, "depth": depth}
    machine = type("Machine", (SchedulerMachine,), given)
    events = [*EVENTS, *(("draft tokens computed again",) if name in ("recurrent", "all") else ())]
    rounds: list[Counter[str]] = []
    # Until rare events have happened, which may need more histories after a change.
    for number in range(MAX_ROUNDS):
        before = tally.copy()
        run_state_machine_as_test(
            machine if IS_DEEP else seed(FIRST_SEED + number)(machine),
            settings=settings(
                max_examples=NUM_EXAMPLES,
                stateful_step_count=50,
                deadline=None,
                database=None,
                # Else every round of a deep run would try the same histories.
                derandomize=not IS_DEEP,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds.append(tally - before)
        assert rounds[-1] not in rounds[:-1], "the histories of an earlier round"
        if not IS_DEEP and is_enough(tally) and all(tally[event] for event in events):
            break
    if os.environ.get("PAGEWICK_TALLY"):
        print(name, dict(tally))
    # That the histories were worth checking.
    assert is_enough(tally), tally
    assert min(tally[event] for event in events) > 0, {event: tally[event] for event in events}
