"""A server that is measured from outside, from its start to its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from pagewick.errors import ConfigError

START_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server that has generated its first token. start_seconds: the time from its start until then.

    environment: variables added to this process's. log: the file for its output. route: embeddings for a server that
    makes these; the first one then takes the place of a token. Raises ConfigError if the server ends or generates
    nothing.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        model: str,
        environment: Mapping[str, str] | None = None,
        route: str = "completions",
    ) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self._port, self._log, self._model, self._route = port, log, model, route
        start = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **(environment or {})}, start_new_session=True
            )
        try:
            self._wait_for_token(start + START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - start

    def pss(self) -> int:
        """Return the bytes of memory of the whole process tree; a page that several processes share counts once."""
        return sum(_pss(process) for process in self._processes())

    def cpu_seconds(self) -> float:
        """Return the processor time of all threads of the process tree so far."""
        return sum(cpu_seconds(process) for process in self._processes())

    def stop(self) -> None:
        processes = self._processes()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
        for process in left:
            process.send_signal(signal.SIGKILL)

    def _processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _wait_for_token(self, deadline: float) -> None:
        while not self._has_token():
            if self._process.poll() is not None or time.perf_counter() > deadline:
                end = self._process.returncode
                what = f"gave no token in {START_TIMEOUT_S:.0f} s" if end is None else f"ended with status {end}"
                tail = self._log.read_text(encoding="utf-8", errors="replace")[-600:].strip()
                raise ConfigError(f"{self._process.args!r} {what}; it said:\n{tail}")
            time.sleep(0.02)

    def _has_token(self) -> bool:
        """Return whether a completion of one token succeeds; a server that is still starting refuses it."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_TIMEOUT_S)
        fields: dict[str, object] = {"prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0}
        if self._route == "embeddings":
            fields = {"input": [1, 2, 3, 4]}
        body = json.dumps({"model": self._model, **fields})
        try:
            connection.request("POST", f"/v1/{self._route}", body, {"content-type": "application/json"})
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def cpu_seconds(process: psutil.Process) -> float:
    """Return a process's processor time, from its threads' schedstat (first number, in ns) or else from clock ticks."""
    try:
        files = list(Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
        if not files:
            times = process.cpu_times()
            return float(times.user + times.system)
        return sum(int(file.read_text(encoding="ascii").split()[0]) for file in files) / 1e9
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return 0.0
