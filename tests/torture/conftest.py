"""Servers, and the seed from which every schedule of faults is drawn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.torture.serving import Server

IS_DEEP = bool(os.environ.get("PAGEWICK_DEEP"))
SEED_VARIABLE = "PAGEWICK_TORTURE_SEED"

# The flags of each kind of server. There are few blocks, so that all of them have soon been used.
FLAGS = {
    # Everything else by default; it shuts down quickly.
    "common": ("--num-kv-blocks", "256", "--shutdown-timeout", "1"),
    # 8 requests run and 40 wait.
    "crowded": ("--max-num-seqs", "8", "--max-waiting-requests", "40", "--shutdown-timeout", "1"),
    # The same, with short timeouts for clients, and a long one for its own shutdown.
    "strict": (
        "--max-num-seqs", "8", "--max-waiting-requests", "40", "--header-timeout", "3", "--write-timeout", "3",
        "--shutdown-timeout", "600",
    ),
}  # fmt: skip


class Servers:
    """One server of each kind, started when it is first asked for, and again after it has ended."""

    def __init__(self, make_directory: Callable[[str], Path]) -> None:
        self._make_directory = make_directory
        self._running: dict[str, Server] = {}

    def get(self, kind: str) -> Server:
        if kind in self._running and self._running[kind].process.poll() is None:
            return self._running[kind]
        if kind in self._running:
            self._running.pop(kind).let_go()
        server = Server(self._make_directory(kind), *FLAGS[kind], module="tests.torture.serve_counted")
        self._running[kind] = server
        server.wait_until_ready()
        return server

    def stop(self) -> None:
        """Stop the servers that still run, and check that they end as they should."""
        for server in self._running.values():
            if server.process.poll() is None:
                server.stop()
            server.let_go()


@pytest.fixture(scope="session")
def is_deep() -> bool:
    """Whether PAGEWICK_DEEP is set: tests then take longer and draw another schedule each time."""
    return IS_DEEP


@pytest.fixture
def seed() -> int:
    """The seed of a test's schedule. It is printed, because pytest shows the output of a test that fails."""
    given = os.environ.get(SEED_VARIABLE)
    seed = int(given) if given else time.time_ns() % 10**9 if IS_DEEP else 20_251
    print(f"to repeat this schedule: {SEED_VARIABLE}={seed}{' PAGEWICK_DEEP=1' if IS_DEEP else ''}")
    return seed


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp)
    yield servers
    servers.stop()


@pytest.fixture
def server(servers: Servers) -> Iterator[Server]:
    """The common server, idle; after the test it must become idle again, with every block where it belongs."""
    yield from idle_before_and_after(servers.get("common"))


@pytest.fixture
def crowded_server(servers: Servers) -> Iterator[Server]:
    """The server with room for few requests, idle before and after the test."""
    yield from idle_before_and_after(servers.get("crowded"))


@pytest.fixture
def strict_server(servers: Servers) -> Iterator[Server]:
    """The strict server, idle before and after the test."""
    yield from idle_before_and_after(servers.get("strict"))


def idle_before_and_after(server: Server) -> Iterator[Server]:
    server.wait_until_idle()
    yield server
    found = server.wait_until_idle()
    assert found["pagewick:kv_blocks_referenced"] == found["pagewick:kv_blocks_leaked"] == 0
    assert found["pagewick:kv_blocks_free"] + found["pagewick:kv_blocks_cached"] == found["pagewick:kv_blocks"]
