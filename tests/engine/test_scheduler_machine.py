"""Random requests, aborts and shortages of memory against scheduler and block manager, step by step, without a model.

PAGEWICK_DEEP=1 tries fifty times as many histories, other ones each time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pagewick.attention.cache_spec import CacheSpec
from pagewick.config import EngineConfig
from pagewick.engine.block_manager import NULL_BLOCK, BlockManager
from pagewick.engine.kv_cache import CacheGroup, blocks_per_group, capacity_of
from pagewick.engine.messages import EngineRequest, RequestDelta, TokenLogprobs
from pagewick.engine.scheduler import Scheduler
from pagewick.engine.sequence import Sequence as TokenSequence
from pagewick.errors import ConfigError
from pagewick.sampling_params import SamplingParams
from tests.engine.requests import full_spec, recurrent_spec, window_spec
from tests.engine.simulation import EOS_TOKEN_IDS, VOCAB_SIZE, Job, SimulatedRunner

IS_DEEP = os.environ.get("PAGEWICK_DEEP") == "1"
NUM_EXAMPLES = 50
DOCUMENTS = [[Random(number).randrange(VOCAB_SIZE) for _ in range(64)] for number in range(3)]


@dataclass
class Setting:
    """The machine's memory and limits."""

    specs: Sequence[CacheSpec]
    num_blocks: Sequence[int]
    max_num_seqs: int
    budget: int
    max_model_len: int
    enable_prefix_caching: bool


@st.composite
def full_only(draw: st.DrawFn) -> list[CacheSpec]:
    return [full_spec(draw(st.sampled_from([1, 2, 4, 5])))]


@st.composite
def with_window(draw: st.DrawFn) -> list[CacheSpec]:
    sizes = draw(st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 2), (2, 4), (3, 12)]))
    return [full_spec(sizes[0]), window_spec(draw(st.integers(1, 14)), sizes[1])]


@st.composite
def recurrent(draw: st.DrawFn, block_sizes: Sequence[int] = (4, 6, 8, 12)) -> CacheSpec:
    size = draw(st.sampled_from(block_sizes))
    return recurrent_spec(size, draw(st.sampled_from([1, size, size // 2])))


@st.composite
def with_recurrent(draw: st.DrawFn) -> list[CacheSpec]:
    return [full_spec(draw(st.sampled_from([1, 2]))), draw(recurrent())]


@st.composite
def every_kind(draw: st.DrawFn) -> list[CacheSpec]:
    return [draw(recurrent((4, 8))), *draw(with_window().filter(lambda specs: specs[1].block_size in (2, 4)))]


@st.composite
def bounded_only(draw: st.DrawFn) -> list[CacheSpec]:
    return draw(st.sampled_from([[draw(recurrent())], draw(with_window())[1:]]))


LAYOUTS = {
    "full": full_only(),
    "window": with_window(),
    "recurrent": with_recurrent(),
    "bounded": bounded_only(),
    "all": every_kind(),
}


@st.composite
def setups(draw: st.DrawFn, layout: st.SearchStrategy[list[CacheSpec]]) -> Setting:
    """Sized by the engine's own arithmetic, from memory that is often tight."""
    specs = draw(layout)
    groups = [CacheGroup(spec, (None,)) for spec in specs]  # type: ignore[arg-type]
    sizes: dict[str, Any] = {}
    if draw(st.booleans()):
        sizes["kv_cache_memory"] = len(specs) * draw(st.integers(12, 80))
    else:
        sizes["num_kv_blocks"] = draw(st.integers(3, 20))
    config = EngineConfig(
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 5, 8, 12, 17, 64])),
        max_model_len=draw(st.integers(8, 60)),
        device="cpu",
        **sizes,
    )
    try:
        num_blocks = blocks_per_group(groups, config)
    except ConfigError:
        assume(False)
    capacity = capacity_of(groups, num_blocks, config)
    assume(capacity >= 6)
    return Setting(
        specs=specs,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        budget=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len or capacity, capacity),
        enable_prefix_caching=draw(st.integers(0, 5)) > 0,
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """What does not depend on the setting: lengths are in percent of what is allowed."""
    return {
        "document": draw(st.integers(0, 2)),
        "changed": draw(st.none() | st.integers(0, 63)),
        "length": draw(st.sampled_from([50, 80, 100]) | st.integers(0, 100)),
        "max_tokens": draw(st.none() | st.integers(0, 100)),
        "min_tokens": draw(st.sampled_from([0, 0, 0, 2, 100])),
        "stop_token_ids": draw(st.sampled_from([(), (), (5,), (9, 3, 12)])),
        "ignore_eos": draw(st.booleans()),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "logprobs": draw(st.sampled_from([None, 0])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        "cache_salt": draw(st.sampled_from([None, None, None, "a", "b"])),
        "priority": draw(st.sampled_from([0, 0, 0, 1, -1])),
        "fails_after": draw(st.sampled_from([None] * 18 + [0, 2])),
    }


@dataclass
class Expected:
    """A request in the engine and what has come of it."""

    job: Job
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class SchedulerMachine(RuleBasedStateMachine):
    layout: st.SearchStrategy[list[CacheSpec]]
    tally: Counter[str]

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.setting = setting = data.draw(setups(self.layout))
        self.blocks = BlockManager(
            setting.specs, setting.num_blocks, hash_key=b"key", enable_prefix_caching=setting.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.budget,
            max_model_len=setting.max_model_len,
            eos_token_ids=EOS_TOKEN_IDS,
        )
        self.runner = SimulatedRunner(
            setting.specs,
            setting.num_blocks,
            max_num_seqs=setting.max_num_seqs,
            budget=setting.budget,
            alignment=self.blocks.chunk_alignment,
        )
        self.live: dict[str, Expected] = {}
        self.num_added = 0

    @rule(several=st.lists(requests(), min_size=1, max_size=3))
    def add(self, several: list[dict[str, Any]]) -> None:
        for wanted in several:
            self._add(wanted)

    def _add(self, wanted: dict[str, Any]) -> None:
        longest = self.setting.max_model_len
        num_prompt_tokens = 1 + (longest - 2) * wanted["length"] // 100
        max_tokens = wanted["max_tokens"]
        if max_tokens is not None:
            max_tokens = 1 + (longest - num_prompt_tokens - 1) * max_tokens // 100
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=wanted["min_tokens"] if max_tokens is None else min(wanted["min_tokens"], max_tokens),
            **{
                name: wanted[name]
                for name in ("stop_token_ids", "ignore_eos", "temperature", "logprobs", "prompt_logprobs")
            },
        )
        prompt = DOCUMENTS[wanted["document"]][:num_prompt_tokens]
        if wanted["changed"] is not None and wanted["changed"] < num_prompt_tokens:
            prompt[wanted["changed"]] = VOCAB_SIZE - 1
        self.num_added += 1
        request = EngineRequest(
            request_id=f"r{self.num_added}",
            prompt_token_ids=prompt,
            params=params,
            seed=self.num_added,
            choice_index=self.num_added % 3,
            priority=wanted["priority"],
            cache_salt=wanted["cache_salt"],
        )
        job = Job(request, longest, wanted["fails_after"])
        self.runner.jobs[request.seed] = job
        self.live[request.request_id] = Expected(job, [], [], [])
        assert not self.scheduler.is_known(request.request_id)
        self.scheduler.add(request)
        assert self.scheduler.is_known(request.request_id)

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step([])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_between=st.booleans())
    def abort(self, data: st.DataObject, is_between: bool) -> None:
        """Before a step, or while one is being computed."""
        request_ids = [data.draw(st.sampled_from(sorted(self.live))), "unknown"]
        if is_between:
            self._step(request_ids)
        else:
            self._abort(request_ids)
        self._check_books()

    def teardown(self) -> None:
        if not hasattr(self, "setting"):
            return
        # Whoever is first in the order advances with every step, or those before it in the plan come to an end.
        limit = sum(len(expected.job.token_ids) for expected in self.live.values()) + len(self.live)
        while self.live:
            assert limit > 0, "someone starves"
            self._step([])
            limit -= 1
        assert not self.scheduler.has_work
        stats = self.scheduler.refresh_stats()
        assert stats.num_referenced_blocks == stats.num_requests_running == stats.num_requests_waiting == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks == sum(self.setting.num_blocks)
        self.tally["preemptions"] += stats.num_preemptions

    def _abort(self, request_ids: Sequence[str]) -> None:
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            assert not self.scheduler.is_known(request_id)
            self.live.pop(request_id, None)

    def _step(self, aborted: Sequence[str]) -> None:
        assert self.scheduler.has_work == bool(self.live)
        num_free = [pool.num_free for pool in self.blocks.pools]
        plan = self.scheduler.schedule()
        assert bool(plan.work) == bool(self.live), "a step without work, while somebody waits"
        num_new = (sum(len(work.new_block_ids[group]) for work in plan.work) for group in range(len(num_free)))
        self.tally["evictions"] += any(new > free for new, free in zip(num_new, num_free, strict=True))
        output = self.runner.submit(plan)
        self._abort(aborted)
        for delta in self.scheduler.update(output):
            self._take(delta)
        self.tally["steps"] += bool(plan.work)
        self._check_books()

    def _take(self, delta: RequestDelta) -> None:
        expected = self.live[delta.request_id]
        job, params = expected.job, expected.job.request.params
        expected.token_ids += delta.token_ids
        expected.logprobs += delta.logprobs or []
        expected.prompt_logprobs += delta.prompt_logprobs or []
        assert expected.token_ids == job.output_token_ids[: len(expected.token_ids)]
        assert expected.prompt_logprobs == job.prompt_logprobs[: len(expected.prompt_logprobs)]
        assert (params.logprobs is None) or len(expected.logprobs) == len(expected.token_ids)
        assert 0 <= delta.num_cached_tokens < job.num_prompt_tokens
        if delta.num_cached_tokens:
            assert self.setting.enable_prefix_caching and params.prompt_logprobs is None
        if delta.finish_reason is None:
            return
        assert (delta.finish_reason, expected.token_ids) == (job.finish_reason, job.output_token_ids)
        assert delta.stop_token_id == (expected.token_ids[-1] if delta.finish_reason == "stop" else None)
        assert (delta.error is not None) == (delta.finish_reason == "error")
        if params.prompt_logprobs is not None and delta.finish_reason != "error":
            assert expected.prompt_logprobs == job.prompt_logprobs
        del self.live[delta.request_id]
        self.tally["finished"] += 1
        self.tally["hits"] += delta.num_cached_tokens > 0

    def _check_books(self) -> None:
        assert self.scheduler.check_integrity() == []
        running: list[TokenSequence] = self.scheduler._running
        stats = self.scheduler.refresh_stats()
        assert stats.num_requests_running == len(running) <= self.setting.max_num_seqs
        assert stats.num_requests_running + stats.num_requests_waiting == len(self.live)
        assert len({seq.slot for seq in running}) == len(running)
        for group, (spec, pool) in enumerate(zip(self.setting.specs, self.blocks.pools, strict=True)):
            places: dict[int, tuple[int, int]] = {}
            for seq in running:
                table = seq.block_tables[group]
                assert len(table) == -(-seq.num_computed_tokens // spec.block_size), "blocks without tokens"
                is_held = [block_id != NULL_BLOCK for block_id in table]
                assert all(before <= after for before, after in pairwise(is_held)), "a hole in a block table"
                for index, block_id in enumerate(table):
                    if block_id == NULL_BLOCK:
                        continue
                    end = (index + 1) * spec.block_size
                    digests = self.live[seq.request_id].job.digests
                    place = (index, digests[end] if end <= seq.num_computed_tokens else seq.arrival)
                    assert places.setdefault(block_id, place) == place, "a block is shared by different prefixes"
            assert pool.num_free + pool.num_cached + len(places) == pool.num_blocks == self.setting.num_blocks[group]
            assert pool.num_referenced == len(places)
            # After a step nobody holds more than the next token may look back at.
            if spec.lookback is not None:
                per_sequence = -(-spec.lookback // spec.block_size) + 1
                assert len(places) <= per_sequence * len(running)


@pytest.mark.timeout(0 if IS_DEEP else 300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_history_gives_every_request_what_it_gets_alone(name: str) -> None:
    tally: Counter[str] = Counter()
    machine = type("Machine", (SchedulerMachine,), {"layout": LAYOUTS[name], "tally": tally})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=NUM_EXAMPLES * (50 if IS_DEEP else 1),
            stateful_step_count=50,
            deadline=None,
            derandomize=not IS_DEEP,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # That the histories were worth checking.
    assert tally["steps"] > 2000 and tally["finished"] > 500, tally
    assert min(tally["preemptions"], tally["evictions"], tally["hits"]) > 0, tally
