"""A real server without requests: its sessions end, and it uses no processor."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

READY = re.compile(r"ready on (http://\S+)")
# How long nothing may happen, and how long to wait for such a time after the last request.
QUIET_S = 3.0
PATIENCE_S = 60.0


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self._main = psutil.Process(process.pid)

    def metric(self, name: str) -> float:
        """Read a metric over a connection of its own. The engine process takes no part in it."""
        with httpx.Client(base_url=self.url, timeout=20) as http:
            found = re.search(rf"^{name}\{{.*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def num_wakeups(self) -> tuple[int, int]:
        """Return how often the threads of the HTTP process, and those of the engine process, have gone to sleep."""
        (engine,) = self._main.children()
        http, engine_sleeps = (
            sum(
                int(line.split()[1])
                for status in Path(f"/proc/{process.pid}/task").glob("*/status")
                for line in status.read_text().splitlines()
                if line.startswith("voluntary_ctxt_switches")
            )
            for process in (self._main, engine)
        )
        return http, engine_sleeps


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--session-ttl", "0.5", "--num-threads", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(match[1] for line in process.stdout if (match := READY.search(line)))
        yield Server(process, url)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_session_ends_without_a_further_request(server: Server) -> None:
    body = {"prompt": "Once upon a time. " * 20, "max_tokens": 2, "session_id": 5}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    deadline = time.monotonic() + PATIENCE_S
    while server.metric("pagewick:sessions") or server.metric("pagewick:kv_blocks_session"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # Blocks that the session no longer holds stay in the prefix cache.
    assert server.metric("pagewick:kv_blocks_cached") > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_server_sleeps(server: Server) -> None:
    """Wake-ups are counted, not times, which depend on what else the machine does.

    The HTTP process may wake up for the line about throughput in the log, which comes every ten seconds.
    """
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 200
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = server.num_wakeups()
        time.sleep(QUIET_S)
        http, engine = (now - then for now, then in zip(server.num_wakeups(), before, strict=True))
        if http <= 1 and engine == 0:
            return
        assert time.monotonic() < deadline, f"in {QUIET_S} s without a request: {http} and {engine} wake-ups"
