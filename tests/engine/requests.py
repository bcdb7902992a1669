"""Requests, schedulers and sequences for tests of the engine's parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.block_manager import BlockManager
from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.engine.scheduler import Scheduler
from pagewick.sampling_params import SamplingParams
from tests.engine.simulation import EOS_TOKEN_IDS, Job, SimulatedRunner


def request(
    prompt_token_ids: Sequence[int], request_id: str = "a", *, seed: int = 1, priority: int = 0,
    cache_salt: str | None = None, **params: Any,
) -> EngineRequest:  # fmt: skip
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        params=SamplingParams(**params),
        seed=seed,
        priority=priority,
        cache_salt=cache_salt,
    )


def full_spec(block_size: int = 4) -> CacheSpec:
    return CacheSpec(kind="full", block_size=block_size, block_bytes=block_size)


def window_spec(lookback: int, block_size: int = 4) -> CacheSpec:
    return CacheSpec(kind="window", block_size=block_size, block_bytes=block_size, lookback=lookback)


def recurrent_spec(block_size: int = 4, chunk_alignment: int = 1) -> CacheSpec:
    return CacheSpec(
        kind="recurrent",
        block_size=block_size,
        block_bytes=block_size,
        lookback=1,
        chunk_alignment=chunk_alignment,
        prefix_reuse="snapshots",
    )


class Simulation:
    """A scheduler and a simulated runner; requests are made here, so that their seeds differ."""

    def __init__(
        self,
        specs: Sequence[CacheSpec] = (),
        num_blocks: Sequence[int] = (16,),
        *,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
    ) -> None:
        specs = specs or [full_spec()]
        self.max_model_len = max_model_len
        self.blocks = BlockManager(specs, num_blocks, hash_key=b"key", enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids=EOS_TOKEN_IDS,
        )
        alignment = self.blocks.chunk_alignment
        self.runner = SimulatedRunner(specs, num_blocks, max_num_seqs=max_num_seqs, budget=budget, alignment=alignment)
        self._seeds: Iterator[int] = count(1)

    def add(self, prompt_token_ids: Sequence[int], *, fails_after: int | None = None, **options: Any) -> Job:
        """Options of `request`; the model's end-of-sequence tokens are ignored unless said otherwise."""
        seed = next(self._seeds)
        options = {"ignore_eos": True, "temperature": 0.0, "request_id": f"r{seed}", **options}
        job = Job(request(prompt_token_ids, seed=seed, **options), self.max_model_len, fails_after)
        self.runner.jobs[seed] = job
        self.scheduler.add(job.request)
        return job

    def step(self) -> dict[str, RequestDelta]:
        """By request id."""
        deltas = self.scheduler.update(self.runner.submit(self.scheduler.schedule()))
        assert self.scheduler.check_integrity() == []
        return {delta.request_id: delta for delta in deltas}

    def run(self, limit: int = 1000) -> dict[str, list[RequestDelta]]:
        """Step until nothing is left."""
        found: dict[str, list[RequestDelta]] = {}
        while self.scheduler.has_work:
            assert limit > 0, "the scheduler does not come to an end"
            limit -= 1
            for request_id, delta in self.step().items():
                found.setdefault(request_id, []).append(delta)
        return found


def token_ids_of(deltas: Sequence[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]
