"""`python -m benchmarks.kv_cache_dtypes`: 8-bit KV caches beside a bfloat16 one, in one interleaved run.

A model of random Q8_0 weights computes a long prompt and then decodes one sequence. Engines that differ only in
--kv-cache-dtype take turns: a round is one prompt, or some decode steps, of each. Printed are medians of the rounds'
ratios to bfloat16, in elapsed and in processor time, so that other work on the machine changes them little.

No decode can gain more than the bytes allow: those of the weights and of the cache that a token reads, with bfloat16
and with the other dtype. Where the cores cannot work as fast as memory is read, it gains less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import click

from benchmarks.gguf_load import random_file
from pagewick.cli.random_model import SHAPES, Shape
from pagewick.config import EngineConfig
from pagewick.devices import num_cores
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.sampling_params import SamplingParams

BASE = "bfloat16"
BLOCK_SIZE = 32
# Bytes of a Q8_0 weight.
WEIGHT_BYTES = 34 / 32


@dataclass(slots=True)
class Seconds:
    """The seconds of each round: elapsed, and processor time."""

    elapsed: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def measure(self, run: Callable[[], object]) -> None:
        started, worked = time.perf_counter(), time.process_time()
        run()
        self.elapsed.append(time.perf_counter() - started)
        self.processor.append(time.process_time() - worked)


def start(path: Path, dtype: str, num_tokens: int, num_threads: int, chunk: int) -> Engine:
    """Start an engine in this process with room for one sequence."""
    config = EngineConfig(
        model=str(path), device="cpu", dtype=BASE, kv_cache_dtype=dtype, max_model_len=num_tokens,
        num_threads=num_threads,
        block_size=BLOCK_SIZE, num_kv_blocks=-(-num_tokens // BLOCK_SIZE) + 1, enable_prefix_caching=False,
        max_num_batched_tokens=chunk, max_num_prefill_tokens=chunk,
    )  # fmt: skip
    return Engine(config)


def add(engine: Engine, shape: Shape, num_tokens: int, max_tokens: int) -> None:
    random = Random(num_tokens)
    engine.add(
        EngineRequest(
            request_id=f"{time.perf_counter()}",
            prompt_token_ids=[random.randrange(256) for _ in range(num_tokens)],
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            seed=0,
        )
    )


def compute_prompt(engine: Engine) -> None:
    """Step until the first token is there."""
    while not engine.step():
        pass


def decode(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def limit(shape: Shape, engines: dict[str, Engine], dtype: str, context: int) -> float:
    """Return how many times as fast a decode with this dtype can be, if memory is all that it waits for."""
    weights = (shape.num_active_parameters + shape.num_head_parameters) * WEIGHT_BYTES

    def num_bytes(name: str) -> float:
        info = engines[name].info
        return weights + context * info.kv_cache_bytes / info.num_kv_blocks / BLOCK_SIZE

    return num_bytes(BASE) / num_bytes(dtype)


def row(dtype: str, kind: str, seconds: dict[str, Seconds], per_round: int, most: str) -> str:
    ours, base = seconds[dtype], seconds[BASE]
    ratios = [
        statistics.median(slow / fast for fast, slow in zip(times, others, strict=True))
        for times, others in ((ours.elapsed, base.elapsed), (ours.processor, base.processor))
    ]
    rate = per_round / statistics.median(ours.elapsed)
    return f"{kind:8}{dtype:10}{rate:12.1f}{ratios[0]:12.2f}{ratios[1]:12.2f}{most:>10}"


@click.command()
@click.option("--shape", "name", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--dtypes", default="int8,fp8_e4m3", show_default=True, help="Compared with bfloat16.")
@click.option("--context", default=8192, show_default=True, help="Tokens of the prompt.")
@click.option("--rounds", default=15, show_default=True, help="Rounds of decode steps.")
@click.option("--steps", default=4, show_default=True, help="Decode steps in a round.")
@click.option("--prompts", default=1, show_default=True, help="Rounds of prompts.")
@click.option("--chunk", default=512, show_default=True, help="Prompt tokens in a step.")
@click.option("--threads", default=num_cores(), show_default=True)
def main(name: str, dtypes: str, context: int, rounds: int, steps: int, prompts: int, chunk: int, threads: int) -> None:
    """Print a row for each dtype: prompts, then decode steps."""
    shape, path, names = SHAPES[name], random_file(name), [BASE, *dtypes.split(",")]
    num_tokens = context + (rounds + 1) * steps + 2
    engines = {dtype: start(path, dtype, num_tokens, threads, chunk) for dtype in names}
    print(f"{name} in Q8_0, {threads} threads, context of {context:,} tokens")
    print("                  tokens/s   times as fast as bfloat16     at most")
    print("                              elapsed   processor")
    seconds = {dtype: Seconds() for dtype in names}
    for last in [False] * (prompts - 1) + [True]:
        for dtype, engine in engines.items():
            add(engine, shape, context, num_tokens - context if last else 1)
            seconds[dtype].measure(partial(compute_prompt, engine))
            while not last and engine.has_work:
                engine.step()
    for dtype in names:
        print(row(dtype, "prompt", seconds, context, ""), flush=True)
    seconds = {dtype: Seconds() for dtype in names}
    for engine in engines.values():
        decode(engine, steps)
    for number in range(rounds):
        # Nobody is always the first after the others.
        for dtype in names[number % len(names) :] + names[: number % len(names)]:
            seconds[dtype].measure(partial(decode, engines[dtype], steps))
    for dtype in names:
        print(row(dtype, "decode", seconds, steps, f"{limit(shape, engines, dtype, context):.2f}"), flush=True)


if __name__ == "__main__":
    main()
