"""One contestant in a process of its own: it reads a scenario as a line of JSON and writes its timing as another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagewick.cli.benchmarking.scenarios import Scenario, Timing

CLOSE_TIMEOUT_S = 10.0


class PeerError(Exception):
    """A contestant ended before it responded; its output on stderr says why."""


class Peer:
    """The parent's side. The process loads its model at once and then waits; `close` ends it.

    module: of ours; with `python`, of another virtual environment, a file. niceness: above 0 if it must not take the
    processor from the server that it measures.
    """

    def __init__(self, module: str | Path, *arguments: object, niceness: int = 0, python: Path | None = None) -> None:
        self._module = module
        start = [sys.executable, "-m"] if python is None else [str(python)]
        command = [*start, str(module), *map(str, arguments)]
        command = ["nice", "-n", str(niceness), *command] if niceness else command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = str(self._receive()["name"])

    def run(self, scenario: Scenario, seed: int) -> Timing:
        """Run a scenario once. Raises PeerError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"scenario": asdict(scenario), "seed": seed}) + "\n")
        self._process.stdin.flush()
        return Timing(**self._receive())

    def close(self) -> None:
        """End the process by closing its input. A process that is busy does not notice and is terminated."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._process.stdout.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise PeerError(f"{self._module} ended with status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def answer_requests(name: str, run: Callable[[Scenario, int], Timing]) -> None:
    """The child's side: write the contestant's name, then run the scenarios that stdin names until it is closed."""
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        timing = run(Scenario(**request["scenario"]), request["seed"])
        print(json.dumps(asdict(timing)), flush=True)
