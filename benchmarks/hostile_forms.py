"""`python -m benchmarks.hostile_forms`: streams beside hostile schemas and grammars.

A server with random weights of a real shape first gets each form of tests/text/grammars/hostile.py alone. Then four
streams run for twice `--seconds` and 15 s more, in windows of 15 s: in every other window, one of the slowest forms
arrives every 5 s, changed so that it is new to the server. Each is compared with the windows before and after it, as
streams become slower while their contexts grow: the ratio of the tokens per second, and in both kinds the gaps between
the tokens of a stream. On a noisy machine, windows without a form have gaps, too.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from pagewick.cli.random_model import SHAPES, bench_cache_dir, cached_random_model
from tests.text.grammars.hostile import HOSTILE

WINDOW_S, INTERVAL_S = 15.0, 5.0
NUM_STREAMS = 4
# A stream that comes to this length is followed by another.
MAX_TOKENS = 3000
# A warm-up, so that the vocabulary of grammars is there.
HARMLESS = {"regex": "[a-z]{8}"}


@dataclass(frozen=True, slots=True)
class Answer:
    name: str
    status: int
    seconds: float


def start_server(model: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "pagewick", "serve", model, "--port", "0", "--no-log-requests"]
    command += ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "8", "--max-body-size", "64MiB"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, next(match[1] for line in server.stdout if (match := re.search(r"ready on (http://\S+)", line)))


def changed(form: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a form that is as costly, and that the server has not seen yet."""
    match form:
        case {"json": dict(schema)}:
            return {"json": {**schema, "title": f"form {number}"}}
        case {"regex": regex}:
            return {"regex": f"(?:{regex})|z{number}"}
        case {"grammar": grammar}:
            return {"grammar": f"{grammar}\n{'#' if '::=' in grammar else '//'} form {number}"}
        case {"choice": choices}:
            return {"choice": [*choices, f"form {number}"]}
    return form


async def ask(http: httpx.AsyncClient, name: str, form: dict[str, Any]) -> Answer:
    """Send a form, and wait for its first tokens or its refusal."""
    started = time.perf_counter()
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 1, "structured_outputs": form}
    response = await http.post("/v1/completions", json=body)
    return Answer(name, response.status_code, time.perf_counter() - started)


async def stream(http: httpx.AsyncClient, number: int, arrivals: list[float]) -> None:
    """Note when each token arrives, until the task is cancelled."""
    body = {
        "prompt": list(range(100 * number, 100 * number + 32)), "max_tokens": MAX_TOKENS, "ignore_eos": True,
        "stream": True, "temperature": 1, "seed": number,
    }  # fmt: skip
    while True:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    arrivals.append(time.perf_counter())


async def attack(http: httpx.AsyncClient, forms: Sequence[str], answers: list[Answer], is_warm: bool) -> None:
    """Send a form every INTERVAL_S, and wait for the answers."""
    sent: list[asyncio.Task[Answer]] = []
    for name in forms:
        form = changed(HOSTILE[name], len(answers) + len(sent) + is_warm)
        sent.append(asyncio.create_task(ask(http, name, form)))
        await asyncio.sleep(INTERVAL_S)
    answers += await asyncio.gather(*sent)


async def measure(url: str, seconds: float) -> dict[str, Any]:
    limits, per_window = httpx.Limits(max_connections=None), round(WINDOW_S / INTERVAL_S)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await ask(http, "harmless", HARMLESS)
        alone = [await ask(http, name, form) for name, form in HOSTILE.items()]
        for one in alone:
            click.echo(f"  {one.name}: {one.status} in {one.seconds:.2f} s")
        slowest = [one.name for one in sorted(alone, key=lambda one: -one.seconds)]
        arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(stream(http, number, noted)) for number, noted in enumerate(arrivals)]
        while not all(len(noted) > 8 for noted in arrivals):
            await asyncio.sleep(0.5)
        windows: list[tuple[float, float]] = []
        answers: list[Answer] = []
        for index in range(2 * max(1, round(seconds / WINDOW_S)) + 1):
            begun = time.perf_counter()
            if index % 2:
                first = index // 2 * per_window
                forms = [slowest[place % len(slowest)] for place in range(first, first + per_window)]
                await attack(http, forms, answers, is_warm=True)
            else:
                await asyncio.sleep(WINDOW_S)
            windows.append((begun, time.perf_counter()))
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return {"alone": alone, "beside": answers, "windows": windows, "arrivals": arrivals}


def rate(found: dict[str, Any], window: tuple[float, float]) -> float:
    """Return the tokens per second of all streams in a window."""
    start, end = window
    num_tokens: int = sum(start <= at < end for noted in found["arrivals"] for at in noted)
    return num_tokens / (end - start)


def gaps(found: dict[str, Any], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Return the gaps that end in one of the windows."""
    return [
        after - before
        for noted in found["arrivals"]
        for before, after in pairwise(noted)
        if any(start <= after < end for start, end in windows)
    ]


def summary(found: dict[str, Any]) -> dict[str, Any]:
    quiet, attacked = found["windows"][::2], found["windows"][1::2]
    alone = [statistics.mean(rate(found, one) for one in both) for both in pairwise(quiet)]
    rates = list(zip(alone, [rate(found, one) for one in attacked], strict=True))
    made: dict[str, Any] = {
        "rates": rates,
        "ratios": [beside / alone for alone, beside in rates],
        "whole_ratio": sum(beside for _, beside in rates) / sum(alone for alone, _ in rates),
        "load_average": psutil.getloadavg(),
    }
    for name, windows in (("without", quiet), ("with", attacked)):
        each = gaps(found, windows)
        middle = statistics.median(each)
        made[name] = {
            "median_gap_s": middle, "longest_gap": max(each) / middle, "num_gaps": len(each),
            "num_above_3": sum(gap > 3 * middle for gap in each),
        }  # fmt: skip
    return made


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--seconds", type=click.FloatRange(WINDOW_S), default=60.0, show_default=True, help="With forms.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
def main(shape: str, seconds: float, output: Path | None) -> None:
    """Measure four streams with and without hostile schemas and grammars beside them."""
    server, url = start_server(str(cached_random_model(shape)))
    try:
        found = asyncio.run(measure(url, seconds))
    finally:
        server.terminate()
        server.wait()
    result = summary(found)
    for one in found["beside"]:
        click.echo(f"  beside streams, {one.name}: {one.status} in {one.seconds:.2f} s")
    ratios = result["ratios"]
    click.echo(
        f"tokens/s with hostile forms: {result['whole_ratio']:.3f} x those without; of each window "
        f"{statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})"
    )
    for name in ("without", "with"):
        row = result[name]
        click.echo(
            f"{name} them: median gap {1e3 * row['median_gap_s']:.0f} ms, longest {row['longest_gap']:.1f} x that, "
            f"{row['num_above_3']} of {row['num_gaps']} above 3 x"
        )
    output = output or bench_cache_dir() / "hostile-forms.json"
    answers = {name: [[one.name, one.status, one.seconds] for one in found[name]] for name in ("alone", "beside")}
    output.write_text(json.dumps(result | answers, indent=2) + "\n", encoding="utf-8")
    click.echo(f"result: {output}")


if __name__ == "__main__":
    main()
