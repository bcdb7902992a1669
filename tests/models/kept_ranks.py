"""The other ranks of engines, in processes that stay for the next engine: starting one takes longer than its work.

python -m tests.models.kept_ranks: such a process. It reads a line for each engine that it shall be a rank of: the
environment that a rank gets from LocalRanks, and what it reads from standard input. It writes a line when that is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest

from pagewick.engine import worker
from pagewick.parallel.launch import LocalRanks, die_with_parent, environment_of


class KeptRanks:
    """Replaces LocalRanks: the same processes serve one engine after another."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, local_rank: int) -> subprocess.Popen[str]:
        while len(self._processes) < local_rank:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.models.kept_ranks", str(os.getpid())],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
                )
            )  # fmt: skip
        return self._processes[local_rank - 1]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    def lend(self, topology: Any, *, module: str, stdin_payload: bytes) -> LocalRanks:
        assert module == worker.__name__
        return _Lent(self, topology, stdin_payload)


class _Lent(LocalRanks):
    def __init__(self, kept: KeptRanks, topology: Any, stdin_payload: bytes) -> None:
        self._kept, self._payload = kept, stdin_payload
        super().__init__(topology, module=worker.__name__)

    def _start(self, local_rank: int, command: list[str], environ: Any) -> None:
        process = self._kept.start(local_rank)
        order = {"environ": environment_of(self.topology, local_rank), "config": self._payload.decode()}
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        self._lent = [*getattr(self, "_lent", []), process]

    def poll(self) -> int | None:
        return next((rank + 1 for rank, process in enumerate(self._lent) if process.poll() is not None), None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.listener is not None
        self.listener.close()
        for process in self._lent:
            assert process.stdout is not None
            if kind is None:
                assert process.stdout.readline() == "done\n"
            else:
                process.kill()


@contextmanager
def kept_ranks() -> Iterator[None]:
    """Engines take their other ranks from processes that are kept until the end."""
    kept = KeptRanks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "LocalRanks", kept.lend)
        try:
            yield
        finally:
            kept.close()


def main() -> None:
    import msgspec

    from pagewick.config import EngineConfig
    from pagewick.parallel.topology import topology_of

    die_with_parent(int(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        config = msgspec.json.decode(order["config"], type=EngineConfig)
        worker.run(config, topology_of(config, order["environ"]))
        print("done", flush=True)


if __name__ == "__main__":
    main()
