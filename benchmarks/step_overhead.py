"""`python -m benchmarks.step_overhead`: the time of a decode step outside its kernels.

A Llama of 28 tiny layers with random weights decodes 1 to 512 sequences, greedily and sampled. A step's kernels are
the model's forward pass, the vocabulary head and the draw from sorted probabilities. The rest is the engine's own time:
scheduling, blocks, the batch's tensors and results. It is given as processor time, which other programs on the machine
disturb less than they do wall-clock time, per step and per sequence; so is encoding the step's message to the server.
If the engine is a process of its own, steps are timed by the arrival of deltas.

With --format, one stream of a model of a real shape decodes instead, quantized at load, and what remains of a step
around its matrix products is given (benchmarks/around_products.py).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import click

from benchmarks.around_products import HEADING, measure_around_products
from benchmarks.weight_files import BF16
from pagewick.cli.bench import open_engine
from pagewick.cli.random_model import SHAPES, Shape, write_random_model
from pagewick.config import EngineConfig
from pagewick.engine.client import EngineClient
from pagewick.engine.messages import EngineRequest, Outputs, RequestDelta, encode_frame
from pagewick.sampling_params import SamplingParams

SHAPE = Shape("LlamaForCausalLM", "llama", 64, 128, 28, 4, 2, 16, 8192, 1e4, 1e-5)
NUM_PROMPT_TOKENS = 32
WARM_UP_STEPS = 20
# Enough for a stable mean, and few enough that all sequences have the same number of blocks now and then.
NUM_STEPS = 100

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds of this thread's processor time that functions take; a call inside another counts once."""

    seconds: float = 0.0
    is_running: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self.is_running:
                return function(*args, **options)
            self.is_running, started = True, time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - started
                self.is_running = False

        return timed


@dataclass(slots=True)
class Steps:
    """Seconds of each step by the clock, and of this thread's processor time: the step, its kernels, its message."""

    num_seqs: int
    wall: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)
    message: list[float] = field(default_factory=list)

    def row(self) -> str:
        rest = [whole - kernels for whole, kernels in zip(self.whole, self.kernels, strict=True)]
        per_sequence = [statistics.mean(seconds) / self.num_seqs for seconds in (rest, self.message)]
        micros = [statistics.median(self.wall), statistics.mean(self.kernels), statistics.mean(rest), *per_sequence]
        return "".join(f"{seconds * 1e6:12.{digits}f}" for seconds, digits in zip(micros, (0, 0, 0, 2, 2), strict=True))


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
    steps = Steps(num_seqs)
    for _ in range(NUM_STEPS):
        kernels.seconds = 0.0
        clock, started = time.perf_counter(), time.thread_time()
        deltas, stats = engine.step(), engine.stats()
        stepped = time.thread_time()
        steps.wall.append(time.perf_counter() - clock)
        steps.whole.append(stepped - started)
        steps.kernels.append(kernels.seconds)
        encode_frame(Outputs(deltas, stats))
        steps.message.append(time.thread_time() - stepped)
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


def print_around_products(shape: str, formats: list[str], num_threads: int, num_rounds: int) -> None:
    click.echo(f"{shape:12}{HEADING}")
    for name in formats:
        config = EngineConfig(device="cpu", num_threads=num_threads, quantization=None if name == BF16 else name)
        with closing(open_engine(config, shape=shape, max_num_seqs=1)) as engine:
            click.echo(f"{name:12}{measure_around_products(engine, num_rounds).row()}")


@click.command()
@click.option("--seqs", type=click.IntRange(1), multiple=True, default=(1, 16, 64, 256, 512), show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--over-process/--in-process", default=None, help="one of the two only")
@click.option("--format", "formats", help="What remains around products with weights in these formats: bf16,q4_k_m.")
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True, help="With --format."
)
@click.option("--rounds", type=click.IntRange(1), default=100, show_default=True, help="With --format.")
def main(
    seqs: tuple[int, ...], threads: int, over_process: bool | None, formats: str | None, shape: str, rounds: int
) -> None:
    """Microseconds of a decode step: by the clock (median), then processor time of its parts (means)."""
    if formats is not None:
        print_around_products(shape, formats.split(","), threads, rounds)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(SHAPE, Path(directory))
        config = EngineConfig(
            model=directory, device="cpu", num_threads=threads, max_num_seqs=max(seqs), num_kv_blocks=16 * max(seqs)
        )
        if not over_process:
            titles = ("step, us", "kernels", "rest", "rest/seq", "message/seq")
            click.echo(f"{'in process':12}{'seqs':>6}" + "".join(f"{title:>12}" for title in titles))
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
