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

MakeServer = Callable[..., Server]


@pytest.fixture(scope="session")
def is_deep() -> bool:
    """PAGEWICK_DEEP: longer, and another schedule each time."""
    return IS_DEEP


@pytest.fixture
def seed() -> int:
    """pytest shows what is printed with a test that fails."""
    given = os.environ.get(SEED_VARIABLE)
    seed = int(given) if given else time.time_ns() % 10**9 if IS_DEEP else 20_251
    print(f"the same faults again: {SEED_VARIABLE}={seed}{' PAGEWICK_DEEP=1' if IS_DEEP else ''}")
    return seed


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Starts a server with these flags; those that still run at the end are stopped, and must stop in order."""
    servers: list[Server] = []

    def make(*flags: str, module: str = "pagewick") -> Server:
        directory: Path = tmp_path_factory.mktemp("server")
        server = Server(directory, *flags, module=module)
        servers.append(server)
        server.wait_until_ready()
        return server

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.stop()
        server.let_go()


@pytest.fixture(scope="session")
def common_server(make_server: MakeServer) -> Server:
    """Whatever was done to it, the next test finds it whole."""
    return make_server(module="tests.torture.serve_counted")


@pytest.fixture
def server(common_server: Server) -> Iterator[Server]:
    """The server with nothing to do; and so it must be again afterwards, with every block where it belongs."""
    common_server.wait_until_idle()
    yield common_server
    found = common_server.wait_until_idle()
    assert found["pagewick:kv_blocks_referenced"] == found["pagewick:kv_blocks_leaked"] == 0
    assert found["pagewick:kv_blocks_free"] + found["pagewick:kv_blocks_cached"] == found["pagewick:kv_blocks"]
