"""A runner without a model: it checks every plan against what it knows of the requests, and makes tokens up.

A token is a pure function of the tokens before it. In place of keys and values the runner stores what they would depend
on, a digest of the prefix, and checks that all that a token looks back at is there and is of its own prefix.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import SlotResult, SlotStart, SlotWork, StepOutput, StepPlan
from pagewick.engine.messages import EngineRequest, TokenLogprobs

VOCAB_SIZE = 40
EOS_TOKEN_IDS = (3, 7)


def chain(salt: str | None, token_ids: Iterable[int]) -> list[int]:
    """Digest of each prefix, the empty one first. Salts are part of it: their blocks must never be shared."""
    digests = [zlib.crc32((salt or "").encode())]
    for token_id in token_ids:
        digests.append(hash((digests[-1], token_id)))
    return digests


def made_up_token(digest: int, seed: int, banned: Iterable[int]) -> int:
    """The token after a prefix; seed 0 is greedy."""
    token_id = hash((digest, seed)) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def made_up_logprobs(digest: int, token_id: int) -> TokenLogprobs:
    """Of a token, given the digest of the prefix that ends with it."""
    return TokenLogprobs(token_id, -(digest % 1000) / 100, 1, [])


@dataclass
class Job:
    """A request and what it is to give when it runs alone; written from the documentation, not from the scheduler."""

    request: EngineRequest
    max_model_len: int
    fails_after: int | None = None
    token_ids: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    num_sampled: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.digests = chain(self.request.cache_salt, self.token_ids)
        self.finish_reason = ""
        while not self.finish_reason:
            self._next()

    def _next(self) -> None:
        params = self.request.params
        num_output_tokens = len(self.token_ids) - len(self.request.prompt_token_ids)
        if num_output_tokens == self.fails_after:
            self.finish_reason = "error"
            return
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS_TOKEN_IDS)}
        banned = ends if num_output_tokens < params.min_tokens else set()
        token_id = made_up_token(self.digests[-1], self.seed, banned)
        self.token_ids.append(token_id)
        self.digests.append(hash((self.digests[-1], token_id)))
        if token_id in ends:
            self.finish_reason = "stop"
        elif num_output_tokens + 1 == params.max_tokens or len(self.token_ids) == self.max_model_len:
            self.finish_reason = "length"

    @property
    def seed(self) -> int:
        return self.request.seed if self.request.params.temperature else 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self.num_prompt_tokens + self.num_sampled

    @property
    def output_token_ids(self) -> list[int]:
        """All that there will be."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return [
            made_up_logprobs(self.digests[place + 1], self.token_ids[place])
            for place in range(1, self.num_prompt_tokens)
        ]


@dataclass
class Slot:
    """num_computed_tokens is None until the first work; last_sampled is the position of the token sampled last."""

    job: Job
    start: SlotStart
    tables: list[list[int]]
    num_computed_tokens: int | None = None
    last_sampled: int | None = None


class SimulatedRunner:
    """Does what a plan says and asserts that it makes sense. Requests are told apart by their seeds."""

    def __init__(
        self, specs: Sequence[CacheSpec], num_blocks: Sequence[int], *, max_num_seqs: int, budget: int, alignment: int
    ) -> None:
        self.specs = specs
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.alignment = alignment
        self.jobs: dict[int, Job] = {}
        self.slots: dict[int, Slot] = {}
        # What stands at each place of each group's memory: per token, or per block where there are snapshots.
        self.memory = [
            [0] * number * (1 if spec.prefix_reuse == "snapshots" else spec.block_size)
            for spec, number in zip(specs, num_blocks, strict=True)
        ]

    def submit(self, plan: StepPlan) -> StepOutput:
        slots = [work.slot for work in plan.work]
        assert len(set(slots)) == len(slots) and all(0 <= slot < self.max_num_seqs for slot in slots)
        assert {start.slot for start in plan.starts} <= set(slots), "a slot is started and given nothing to do"
        assert sum(work.num_tokens for work in plan.work) <= self.budget
        for start in plan.starts:
            self._start(start)
        for work in plan.work:
            self._take_in(work)
        for work in plan.work:
            self._look_back(work, work.start)
        for work in plan.work:
            self._write(work)
        for work in plan.work:
            self._look_back(work, work.start + work.num_tokens)
        return StepOutput([self._answer(work) for work in plan.work])

    def _start(self, start: SlotStart) -> None:
        job = self.jobs[start.sampling.seed]
        params, sampling = job.request.params, start.sampling
        for name in ("temperature", "top_k", "top_p", "logprobs", "prompt_logprobs"):
            assert getattr(sampling, name) == getattr(params, name)
        assert sampling.choice_index == job.request.choice_index
        self.slots[start.slot] = Slot(job, start, [list(table) for table in start.block_tables])

    def _take_in(self, work: SlotWork) -> None:
        """Check the tokens and extend the block tables."""
        slot, end = self.slots[work.slot], work.start + work.num_tokens
        job = slot.job
        if slot.num_computed_tokens is None:
            for spec, table in zip(self.specs, slot.tables, strict=True):
                assert len(table) * spec.block_size == work.start, "the prefix hit is not what the tables hold"
        else:
            assert work.start == slot.num_computed_tokens, "tokens are computed twice or left out"
        assert work.num_tokens > 0 and end <= job.num_tokens
        if work.token_ids is None:
            assert work.num_tokens == 1 and slot.last_sampled == work.start, "the slot did not sample this token"
        else:
            assert work.token_ids == job.token_ids[work.start : end]
        assert work.is_sampled == (end == job.num_tokens)
        assert work.is_sampled or end % self.alignment == 0, "a chunk ends where the caches cannot resume"
        wants_targets = job.request.params.prompt_logprobs is not None
        assert work.prompt_targets == (job.request.prompt_token_ids[work.start + 1 : end + 1] if wants_targets else [])
        for spec, table, new in zip(self.specs, slot.tables, work.new_block_ids, strict=True):
            assert -1 not in new
            table += new
            assert len(table) == -(-end // spec.block_size)
        slot.num_computed_tokens = end

    def _look_back(self, work: SlotWork, num_tokens: int) -> None:
        """Check that what stands in memory up to `num_tokens` is what the work's tokens need."""
        slot = self.slots[work.slot]
        for spec, table, memory in zip(self.specs, slot.tables, self.memory, strict=True):
            if spec.prefix_reuse == "snapshots":
                places = range(max(0, num_tokens - 1), num_tokens)
            else:
                first = 0 if spec.lookback is None else max(0, work.start - spec.lookback)
                places = range(first, num_tokens)
            for place in places:
                block_id = table[place // spec.block_size]
                assert block_id != -1, "a block that is looked back at has been let go"
                found = memory[self._address(spec, block_id, place)]
                assert found == slot.job.digests[place + 1], f"{spec.kind}: position {place} holds something else"

    def _write(self, work: SlotWork) -> None:
        slot, end = self.slots[work.slot], work.start + work.num_tokens
        for spec, table, memory in zip(self.specs, slot.tables, self.memory, strict=True):
            first = end - 1 if spec.prefix_reuse == "snapshots" else work.start
            for place in range(first, end):
                memory[self._address(spec, table[place // spec.block_size], place)] = slot.job.digests[place + 1]

    def _address(self, spec: CacheSpec, block_id: int, place: int) -> int:
        if spec.prefix_reuse == "snapshots":
            return block_id
        return block_id * spec.block_size + place % spec.block_size

    def _answer(self, work: SlotWork) -> SlotResult:
        slot, result = self.slots[work.slot], SlotResult()
        job, sampling, end = slot.job, slot.start.sampling, work.start + work.num_tokens
        if work.prompt_targets:
            result.prompt_logprobs = [
                made_up_logprobs(job.digests[work.start + place + 2], token_id)
                for place, token_id in enumerate(work.prompt_targets)
            ]
        if not work.is_sampled:
            return result
        if job.num_sampled == job.fails_after:
            result.error = "made up"
            return result
        banned = sampling.stop_token_ids if end < sampling.min_position else ()
        token_id = made_up_token(job.digests[end], job.seed, banned)
        result.token_ids = [token_id]
        if sampling.logprobs is not None:
            result.logprobs = [made_up_logprobs(job.digests[end + 1], token_id)]
        slot.last_sampled = end
        job.num_sampled += 1
        return result
