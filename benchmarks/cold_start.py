"""From the start of a process to its first token: `pagewick complete --max-tokens 1`, and where the time goes.

The whole is measured at the command itself, from outside: from its start to the first byte of its answer. The split
comes from a process that takes the same steps one by one (`python -m benchmarks.cold_start MODEL THREADS START`, START
on the monotonic clock) and looks at the clock between them.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

from pagewick.errors import ConfigError

PROMPT = "Pagewick is"
IMPORT_TORCH = "import torch"


def command_seconds(model: Path, num_threads: int) -> float:
    """Of `pagewick complete`, until it has printed a token. Raises ConfigError if it prints none."""
    command = [sys.executable, "-m", "pagewick", "complete", str(model), "-p", PROMPT, "--max-tokens", "1"]
    command += ["--num-threads", str(num_threads), "--temperature", "0"]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.monotonic() - start
        process.stdout.read()
    if process.returncode or not first.strip(b"\n"):
        raise ConfigError(f"pagewick complete ended with status {process.returncode} and no token")
    return seconds


def split_seconds(model: Path, num_threads: int) -> dict[str, float]:
    """What each step took, in their order; their sum is the time to the first token. Raises ConfigError."""
    command = [sys.executable, "-m", "benchmarks.cold_start", str(model), str(num_threads), repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"the split of a cold start cannot be measured: {done.stderr.strip()[-400:]}")
    split: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return split


def transformers_seconds(model: Path, num_threads: int) -> float:
    """Of a process that imports transformers, loads the model and generates a token."""
    from benchmarks.peer import Peer
    from pagewick.cli.bench import Scenario

    start = time.monotonic()
    peer = Peer("benchmarks.peer_transformers", model, "cpu", num_threads)
    try:
        peer.run(Scenario("first token", 4, 1), 0)
        return time.monotonic() - start
    finally:
        peer.close()


def main() -> None:
    model, num_threads, start = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    times = {"start Python": time.monotonic()}
    # Before all else, since whatever comes after it would bring it along.
    importlib.import_module("torch")
    times[IMPORT_TORCH] = time.monotonic()
    from pagewick.config import EngineConfig
    from pagewick.llm import LLM
    from pagewick.sampling_params import SamplingParams

    times["import Pagewick"] = time.monotonic()
    with LLM(config=EngineConfig(model=model, num_threads=num_threads)) as llm:
        times["load the model"] = time.monotonic()
        next(iter(llm.stream(PROMPT, SamplingParams(max_tokens=1, temperature=0))))
        times["first token"] = time.monotonic()
    begun = [start, *times.values()]
    print(json.dumps({name: end - begin for (name, end), begin in zip(times.items(), begun, strict=False)}))


if __name__ == "__main__":
    main()
