"""One contestant in a process of its own: a line of JSON in says what to run, a line of JSON out how long it took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pagewick.cli.bench import Scenario, Timing

CLOSE_TIMEOUT_S = 10.0


class PeerError(Exception):
    """A contestant ended before it answered; what it wrote to stderr says why."""


class Peer:
    """The parent's side. The process loads its model at once and then waits; `close` ends it.

    niceness: above 0 where it must not take the processor from what it measures.
    """

    def __init__(self, module: str, *arguments: object, niceness: int = 0) -> None:
        self._module = module
        command = [sys.executable, "-m", module, *map(str, arguments)]
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
        """Closed pipes are the sign to end. Who is at work when the whole comparison is ended does not see it."""
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
    """The child's side: introduce itself, then run what stdin asks for until it is closed."""
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        timing = run(Scenario(**request["scenario"]), request["seed"])
        print(json.dumps(asdict(timing)), flush=True)
