"""`python -m benchmarks.step_overhead`: the time of a decode step outside its kernels.

A Llama of 28 tiny layers with random weights decodes 1, 8 and 32 sequences, greedily and sampled. A step's kernels are
the model's forward pass, the vocabulary head and the draw from sorted probabilities. The rest is the engine's own time:
scheduling, blocks, the batch's tensors and results. If the engine is a process of its own, steps are timed by the
arrival of deltas, and the difference to the engine in this process is the cost of messages.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import click

from pagewick.cli.random_model import Shape, write_random_model
from pagewick.config import EngineConfig
from pagewick.engine.client import EngineClient
from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.sampling_params import SamplingParams

SHAPE = Shape("LlamaForCausalLM", "llama", 64, 128, 28, 4, 2, 16, 8192, 1e4, 1e-5)
NUM_PROMPT_TOKENS = 32
WARM_UP_STEPS = 20
# Enough for a stable median, and few enough that all sequences have the same number of blocks now and then.
NUM_STEPS = 200

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds that functions take."""

    seconds: float = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


@dataclass(slots=True)
class Steps:
    """Seconds of each step, and of the kernels in it."""

    whole: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)

    def row(self) -> str:
        rest = [whole - kernels for whole, kernels in zip(self.whole, self.kernels, strict=True)]
        return "".join(f"{statistics.median(seconds) * 1e6:12.0f}" for seconds in (self.whole, self.kernels, rest))


def requests(num_seqs: int, params: dict[str, Any]) -> list[EngineRequest]:
    """Return requests whose prompts share no prefix, and whose outputs last for the whole measurement."""
    max_tokens = WARM_UP_STEPS + NUM_STEPS + 2
    random = Random(num_seqs)
    return [
        EngineRequest(
            request_id=f"{random.random()}",
            prompt_token_ids=[random.randrange(SHAPE.vocab_size) for _ in range(NUM_PROMPT_TOKENS)],
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
            seed=index,
        )
        for index in range(num_seqs)
    ]


def measure_in_process(engine: Any, kernels: Stopwatch, num_seqs: int, params: dict[str, Any]) -> Steps:
    """Run decode steps of an Engine; the stopwatch measures their kernels."""
    for request in requests(num_seqs, params):
        engine.add(request)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    steps = Steps()
    for _ in range(NUM_STEPS):
        kernels.seconds = 0.0
        started = time.perf_counter()
        engine.step()
        steps.whole.append(time.perf_counter() - started)
        steps.kernels.append(kernels.seconds)
    while engine.has_work:
        engine.step()
    return steps


async def measure_over_process(client: EngineClient, num_seqs: int, params: dict[str, Any]) -> float:
    """Return the median seconds from delta to delta of the first sequence."""
    arrivals: list[float] = []

    async def follow(request: EngineRequest, noted: list[float]) -> None:
        ended = asyncio.Event()

        def take(news: list[RequestDelta] | Exception) -> None:
            noted.append(time.perf_counter())
            if isinstance(news, Exception) or news[-1].finish_reason is not None:
                ended.set()

        client.open(request, take)
        await ended.wait()

    first, *others = requests(num_seqs, params)
    await asyncio.gather(follow(first, arrivals), *(follow(other, []) for other in others))
    arrivals = arrivals[WARM_UP_STEPS:]
    return statistics.median(after - before for before, after in pairwise(arrivals))


def watched_engine(config: EngineConfig) -> tuple[Any, Stopwatch]:
    """Return an Engine, and the stopwatch that measures its kernels."""
    from pagewick import kernels
    from pagewick.engine.engine import Engine

    engine, stopwatch = Engine(config), Stopwatch()
    runner = engine._ranks.runner
    runner._forward = stopwatch.around(runner._forward)
    model = runner.model
    model.compute_logits = stopwatch.around(model.compute_logits)  # type: ignore[method-assign]
    kernels.sample_tokens = stopwatch.around(kernels.sample_tokens)
    return engine, stopwatch


async def print_over_process(config: EngineConfig, num_seqs: tuple[int, ...]) -> None:
    client = await EngineClient.start(config)
    try:
        for name, params in PARAMS.items():
            for number in num_seqs:
                seconds = await measure_over_process(client, number, params)
                click.echo(f"{name:12}{number:6}{seconds * 1e6:12.0f}")
    finally:
        await client.close()


@click.command()
@click.option("--seqs", type=click.IntRange(1), multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--over-process/--in-process", default=None, help="one of the two only")
def main(seqs: tuple[int, ...], threads: int, over_process: bool | None) -> None:
    """Microseconds of a decode step, of its kernels and of the rest: medians."""
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(SHAPE, Path(directory))
        config = EngineConfig(
            model=directory, device="cpu", num_threads=threads, max_num_seqs=max(seqs), num_kv_blocks=64 * max(seqs)
        )
        if not over_process:
            click.echo(f"{'in process':12}{'seqs':>6}{'step, us':>12}{'kernels':>12}{'rest':>12}")
            engine, stopwatch = watched_engine(config)
            for name, params in PARAMS.items():
                for number in seqs:
                    click.echo(f"{name:12}{number:6}{measure_in_process(engine, stopwatch, number, params).row()}")
            engine.close()
        if over_process is not False:
            click.echo(f"\n{'over process':12}{'seqs':>6}{'step, us':>12}")
            asyncio.run(print_over_process(config, seqs))


if __name__ == "__main__":
    main()
