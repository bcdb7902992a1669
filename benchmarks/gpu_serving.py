"""Serves requests for the measurements of benchmarks.gpu, and notes when their tokens come."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu_models import Place
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.sampling_params import SamplingParams

Figures = dict[str, float | str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. A dry run has the smallest numbers that go through everything."""

    num_runs: int = 5
    num_output: int = 256
    prompts: tuple[int, ...] = (512, 8192)
    num_requests: int = 256
    request_tokens: tuple[int, int] = (100, 1024)
    bandwidth_bytes: int = 2**32
    agreement_tokens: int = 16384
    chunk: int = 512
    num_responses: int = 40

    @classmethod
    def of(cls, place: Place) -> Sizes:
        return cls(2, 4, (8, 40), 6, (3, 9), 2**16, 64, 32, 5) if place.is_dry else cls()


@dataclass(slots=True)
class Outcome:
    """The outcome of some requests. arrivals: for each request, the time of each delta in seconds, and its tokens."""

    arrivals: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    deltas: list[RequestDelta] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(count for arrivals in self.arrivals.values() for _, count in arrivals)

    @property
    def first_token_seconds(self) -> float:
        return min(arrivals[0][0] for arrivals in self.arrivals.values())

    @property
    def decode_rate(self) -> float:
        """Tokens per second of a single request, from its first token to its last."""
        (arrivals,) = self.arrivals.values()
        return (self.num_tokens - arrivals[0][1]) / (arrivals[-1][0] - arrivals[0][0])


def serve(engine: Engine, place: Place, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Outcome:
    """Serve requests that come all at once."""
    outcome = Outcome()
    place.finish()
    began = time.perf_counter()
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=list(prompt), params=one, seed=number))
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter() - began
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"request {delta.request_id}: {delta.error}")
            if delta.token_ids:
                outcome.arrivals.setdefault(delta.request_id, []).append((now, len(delta.token_ids)))
        outcome.deltas += deltas
    outcome.seconds = time.perf_counter() - began
    return outcome


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def prompt_of(vocab_size: int, length: int, seed: int) -> list[int]:
    """Return random tokens; another seed gives other ones, which the prefix cache does not have."""
    chosen = random.Random(seed)
    return [chosen.randrange(vocab_size) for _ in range(length)]


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
