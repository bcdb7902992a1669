"""`python -m benchmarks.restart`: the first token of a long prompt, cold, and after a restart with --kv-cache-disk.

Every engine is a process of its own. Cold: the directory is empty. Warm: another process has served the same prompt
with the same directory and has ended. The files were just written, so they are read from the page cache; from a disk,
their size divided by its bandwidth comes on top.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import click

from pagewick.cli.random_model import SHAPES, bench_cache_dir, cached_random_model
from pagewick.config import EngineConfig
from pagewick.devices import num_cores


def first_token(
    model: str, directory: str, num_prompt_tokens: int, vocab_size: int, num_threads: int
) -> dict[str, Any]:
    """Run one request in a new engine; return its time to first token in seconds, its cached tokens and more."""
    from pagewick.engine.engine import Engine
    from pagewick.engine.messages import EngineRequest
    from pagewick.sampling_params import SamplingParams

    engine = Engine(
        EngineConfig(model=model, device="cpu", dtype="bfloat16", num_threads=num_threads, kv_cache_disk=directory)
    )
    # The warm-up is not measured: a process's first step starts threads and generates code of the matrix library.
    warm_up = [Random(1).randrange(vocab_size) for _ in range(64)]
    prompt = [Random(2).randrange(vocab_size) for _ in range(num_prompt_tokens)]
    for request_id, token_ids in (("warm-up", warm_up), ("measured", prompt)):
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
        started = time.perf_counter()
        engine.add(EngineRequest(request_id=request_id, prompt_token_ids=token_ids, params=params, seed=0))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        seconds = time.perf_counter() - started
    started = time.perf_counter()
    engine.close()
    return {
        "ttft_s": seconds,
        "cached_tokens": deltas[-1].num_cached_tokens,
        "token_ids": deltas[-1].token_ids,
        "close_s": time.perf_counter() - started,
    }


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(64), default=2000, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=num_cores())
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
@click.option("--child", hidden=True)
def main(shape: str, prompt_tokens: int, repeats: int, threads: int, output: Path | None, child: str | None) -> None:
    """Measure the time to first token before and after a restart."""
    model = str(cached_random_model(shape))
    if child is not None:
        click.echo(json.dumps(first_token(model, child, prompt_tokens, SHAPES[shape].vocab_size, threads)))
        return
    command = [sys.executable, "-m", "benchmarks.restart", "--shape", shape, "--prompt-tokens", str(prompt_tokens)]
    command += ["--threads", str(threads)]
    cold: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            for found in (cold, warm):
                run = subprocess.run([*command, "--child", directory], check=True, capture_output=True, text=True)
                found.append(json.loads(run.stdout.splitlines()[-1]))
    ratios = [before["ttft_s"] / after["ttft_s"] for before, after in zip(cold, warm, strict=True)]
    click.echo(
        f"{prompt_tokens} tokens: first token after {statistics.median(run['ttft_s'] for run in cold):.2f} s cold, "
        f"{statistics.median(run['ttft_s'] for run in warm):.2f} s after a restart: {statistics.median(ratios):.1f} x "
        f"sooner (from {min(ratios):.1f} to {max(ratios):.1f}); cached_tokens {warm[-1]['cached_tokens']}; "
        f"same token: {all(a['token_ids'] == b['token_ids'] for a, b in zip(cold, warm, strict=True))}; "
        f"writing at the end took {statistics.median(run['close_s'] for run in cold):.2f} s"
    )
    output = output or bench_cache_dir() / "restart.json"
    result = {"shape": shape, "prompt_tokens": prompt_tokens, "threads": threads, "cold": cold, "warm": warm}
    output.write_text(json.dumps(result | {"ratios": ratios}, indent=2) + "\n", encoding="utf-8")
    click.echo(f"result: {output}")


if __name__ == "__main__":
    main()
