"""The fixed measurements of `pagewick bench`, and their runs on an engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewick.cli.benchmarking.measurement import Spread
from pagewick.engine.messages import EngineRequest
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import EngineError
from pagewick.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine

DEFAULT_BATCH = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """A number of streams at once, each with a random prompt and greedy tokens; lengths are in tokens.

    pooling: as in EngineRequest, for models that write no text.
    """

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_streams: int = 1
    pooling: str = ""

    @property
    def is_prefill(self) -> bool:
        return self.num_output_tokens <= 1

    @property
    def max_len(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return random token ids, new ones for every seed, so that no run finds an earlier prompt in a cache."""
        draw = random.Random(seed).randrange
        return [[draw(vocab_size) for _ in range(self.num_prompt_tokens)] for _ in range(self.num_streams)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one run of a scenario, in seconds from its start.

    num_tokens_later: tokens that came after every stream had its first.
    """

    first_token_seconds: float
    total_seconds: float
    num_tokens_later: int

    def tokens_per_second(self, scenario: Scenario) -> float:
        """Return prompt tokens per second of a prefill, otherwise output tokens per second of all streams together."""
        if scenario.is_prefill:
            return scenario.num_prompt_tokens * scenario.num_streams / self.total_seconds
        return self.num_tokens_later / (self.total_seconds - self.first_token_seconds)


def scenarios(batch: int = DEFAULT_BATCH) -> list[Scenario]:
    return [
        Scenario("prefill 512", 512, 1),
        Scenario("prefill 2048", 2048, 1),
        Scenario("decode, 1 stream", 128, 128),
        Scenario(f"decode, {batch} streams", 64, 64, batch),
    ]


def scenarios_without_text(batch: int, pooling: str) -> list[Scenario]:
    """Return the measurements of a model that makes embeddings or rates texts. pooling: as in EngineRequest."""
    name = "rate" if pooling == "score" else "embed"
    return [
        Scenario(f"{name} 128, 1 text", 128, 0, pooling=pooling),
        Scenario(f"{name} 128, {batch} texts", 128, 0, batch, pooling),
        Scenario(f"{name} 500, 1 text", 500, 0, pooling=pooling),
        Scenario(f"{name} 500, {batch} texts", 500, 0, batch, pooling),
    ]


def run_scenario(
    engine: Engine, scenario: Scenario, *, seed: int, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Run a scenario once on an idle engine. Raises EngineError if a stream fails."""
    params = SamplingParams(temperature=0, max_tokens=scenario.num_output_tokens, ignore_eos=True)
    prompts = scenario.prompts(engine.info.vocab_size, seed)
    waiting = {f"bench-{seed}-{index}" for index in range(len(prompts))}
    start = clock()
    for request_id, prompt_token_ids in zip(sorted(waiting), prompts, strict=True):
        engine.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=seed,
                pooling=scenario.pooling,
            )
        )
    num_tokens_later, first_token_time = 0, start
    while engine.has_work:
        deltas = engine.step()
        if any(delta.error for delta in deltas):
            raise EngineError(next(delta.error for delta in deltas if delta.error) or "")
        if not waiting:
            num_tokens_later += sum(len(delta.token_ids) for delta in deltas)
            continue
        waiting -= {delta.request_id for delta in deltas if delta.token_ids or delta.finish_reason}
        if not waiting:
            first_token_time = clock()
    return Timing(first_token_time - start, clock() - start, num_tokens_later)


def measure(engine: Engine, wanted: list[Scenario], repeats: int) -> dict[Scenario, Spread]:
    """Measure tokens per second in `repeats` runs of each scenario, after one that is not counted; they alternate."""
    rates: dict[Scenario, list[float]] = {scenario: [] for scenario in wanted}
    for repeat in range(repeats + 1):
        for index, scenario in enumerate(wanted):
            timing = run_scenario(engine, scenario, seed=repeat * len(wanted) + index)
            if repeat:
                rates[scenario].append(timing.tokens_per_second(scenario))
    return {scenario: Spread.of(values) for scenario, values in rates.items()}


def pooling_of(info: ModelInfo) -> str:
    """Return how a model that writes no text is asked, as in EngineRequest; empty for one that writes text."""
    return "score" if info.num_labels else info.embedding
