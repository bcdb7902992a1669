"""`python -m benchmarks.remote_prefill`: streams beside long prompts, which this server or another one computes.

One server with all threads is compared with two on the same machine, which have half of the threads each and share a
directory in memory: clients talk to one, and the other computes its long prompts (--prefill-url). Each round has some
streams that generate all the time, and long prompts that come one after the other. Both ways take turns. It prints the
gaps between two tokens of the streams, the tokens per second of all streams, and the seconds until the first token of a
long prompt. Weights are random, and prompts are new in every round.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import httpx

from benchmarks.server_process import ServerProcess, free_port
from pagewick.cli.random_model import SHAPES, cached_random_model

# Token ids that every vocabulary of these shapes has, none of them special.
IDS = range(1000, 20_000)


def serve(
    model: str, threads: int, first_core: int, log: Path, *flags: str, quantization: str | None = None
) -> ServerProcess:
    port = free_port()
    cores = f"{first_core}-{first_core + threads - 1}"
    command = ["taskset", "-c", cores, sys.executable, "-m", "pagewick", "serve", model, "--port", str(port)]
    command += ["--num-threads", str(threads), "--no-log-requests", *flags]
    if quantization is not None:
        command += ["--quantization", quantization]
    return ServerProcess(command, port, log, model=model)


async def stream(client: httpx.AsyncClient, url: str, prompt: Sequence[int], num_tokens: int) -> list[float]:
    """Return the times at which the tokens of a response came."""
    body = {"prompt": list(prompt), "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": 1}
    times = []
    async with client.stream("POST", f"{url}/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())
    return times


async def measure(url: str, streams: int, prompts: int, length: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    gaps: list[float] = []
    waits: list[float] = []
    num_tokens, is_over = 0, False

    async def generate(client: httpx.AsyncClient) -> None:
        nonlocal num_tokens
        while not is_over:
            times = await stream(client, url, rng.choices(IDS, k=16), 64)
            gaps.extend(after - before for before, after in itertools.pairwise(times))
            num_tokens += len(times)

    async with httpx.AsyncClient(timeout=600) as client:
        began = time.perf_counter()
        running = [asyncio.create_task(generate(client)) for _ in range(streams)]
        for _ in range(prompts):
            sent = time.perf_counter()
            (first, *_) = await stream(client, url, rng.choices(IDS, k=length), 4)
            waits.append(first - sent)
        is_over = True
        await asyncio.gather(*running)
        took_s = time.perf_counter() - began
    gaps.sort()
    return {
        "gap p50 ms": 1e3 * gaps[len(gaps) // 2],
        "gap p99 ms": 1e3 * gaps[len(gaps) * 99 // 100],
        "longest gap ms": 1e3 * gaps[-1],
        "tokens/s": num_tokens / took_s,
        "first token of a long prompt s": statistics.median(waits),
    }


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--quantization", help="Format of the weights, such as q8_0.")
@click.option("--threads", default=2, show_default=True, help="Threads of both ways, half of them for each server.")
@click.option("--streams", default=2, show_default=True)
@click.option("--prompts", default=3, show_default=True, help="Long prompts in a round.")
@click.option("--length", default=2048, show_default=True, help="Tokens of a long prompt.")
@click.option("--rounds", default=3, show_default=True)
def main(
    shape: str, quantization: str | None, threads: int, streams: int, prompts: int, length: int, rounds: int
) -> None:
    model = str(cached_random_model(shape))
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        shared = ("--kv-cache-disk", disk, "--kv-cache-disk-shared", "--kv-cache-memory", "2GiB")
        half = threads // 2
        other = serve(model, half, half, logs / "other", *shared, quantization=quantization)
        stack.callback(other.stop)
        here = serve(model, half, 0, logs / "here", *shared, "--prefill-url", other.url, quantization=quantization)
        stack.callback(here.stop)
        alone = serve(model, threads, 0, logs / "alone", "--kv-cache-memory", "2GiB", quantization=quantization)
        stack.callback(alone.stop)
        found: dict[str, list[dict[str, float]]] = {"one server": [], "two servers": []}
        for seed in range(rounds):
            for name, server in (("one server", alone), ("two servers", here)):
                found[name].append(asyncio.run(measure(server.url, streams, prompts, length, seed)))
        click.echo(f"{shape}, {threads} threads, {streams} streams beside prompts of {length} tokens, {rounds} rounds")
        medians: dict[str, dict[str, Any]] = {
            name: {figure: statistics.median(one[figure] for one in runs) for figure in runs[0]}
            for name, runs in found.items()
        }
        for figure in medians["one server"]:
            ratios = sorted(
                two[figure] / one[figure] for one, two in zip(found["one server"], found["two servers"], strict=True)
            )
            values = "  ".join(f"{name} {medians[name][figure]:8.1f}" for name in medians)
            click.echo(
                f"{figure:32} {values}  ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
