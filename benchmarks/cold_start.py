"""The time from the start of a process to its first token, with `pagewick complete --max-tokens 1`, and its parts.

The total is measured from outside, from the start of the command to the first byte of its output. The parts come from
another process that takes the same steps (`python -m benchmarks.cold_start MODEL THREADS START`, START on the monotonic
clock) and reads the clock between them. Pagewick does other work while torch is imported, which may slow the import
down; so an import of torch alone in a process is measured, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pagewick.errors import ConfigError

PROMPT = "Pagewick is"


def command_seconds(model: Path, num_threads: int) -> float:
    """Return the seconds until `pagewick complete` has printed a token. Raises ConfigError if it prints none."""
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
    """Return the seconds of each step, in order; their sum is the time to the first token. Raises ConfigError."""
    command = [sys.executable, "-m", "benchmarks.cold_start", str(model), str(num_threads), repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"the parts of a cold start cannot be measured: {done.stderr.strip()[-400:]}")
    split: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return split


def torch_seconds() -> float:
    """Return the seconds of an import of torch in a process that does nothing else."""
    code = "import time; start = time.monotonic(); import torch; print(time.monotonic() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def transformers_seconds(model: Path, num_threads: int) -> float:
    """Return the seconds in which a process imports transformers, loads the model and generates a token."""
    from benchmarks.peer import Peer
    from pagewick.cli.benchmarking.scenarios import Scenario

    start = time.monotonic()
    peer = Peer("benchmarks.peer_transformers", model, "cpu", num_threads)
    try:
        peer.run(Scenario("first token", 4, 1), 0)
        return time.monotonic() - start
    finally:
        peer.close()


class TorchClock(importlib.abc.MetaPathFinder):
    """Measures how long the import of torch takes, at any place in the program; `seconds` is 0 before it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, "torch is not installed"
        execute = spec.loader.exec_module

        def timed(module: ModuleType) -> None:
            start = time.monotonic()
            execute(module)
            self.seconds = time.monotonic() - start

        spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


def main() -> None:
    model, num_threads, start = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    started = time.monotonic()
    clock = TorchClock()
    sys.meta_path.insert(0, clock)
    from pagewick.config import EngineConfig
    from pagewick.llm import LLM
    from pagewick.sampling_params import SamplingParams

    imported, before = time.monotonic(), clock.seconds
    with LLM(config=EngineConfig(model=model, num_threads=num_threads)) as llm:
        loaded = time.monotonic()
        next(iter(llm.stream(PROMPT, SamplingParams(max_tokens=1, temperature=0))))
        done = time.monotonic()
    split = {
        "start Python": started - start,
        "import Pagewick": imported - started - before,
        "import torch": clock.seconds,
        "load the model": loaded - imported - (clock.seconds - before),
        "first token": done - loaded,
    }
    print(json.dumps(split))


if __name__ == "__main__":
    main()
