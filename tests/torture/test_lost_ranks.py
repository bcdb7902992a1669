"""Two machines with a rank each, one of which falls silent: clients are told, and a new rank is found again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.parallel.test_collectives import free_port
from tests.torture.serving import COMPLETIONS, DEADLINE_S, Server

RANK_TIMEOUT_S = 3.0
FLAGS = ("--device", "cpu", "--num-kv-blocks", "256", "--rank-timeout", str(RANK_TIMEOUT_S))


def variables_of(rank: int, port: int) -> dict[str, str]:
    own = {"RANK": str(rank), "GROUP_RANK": str(rank)}
    return {
        **own, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@pytest.fixture
def start_rank_1(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Return what starts rank 1 as on a second machine, given the port."""
    started: list[subprocess.Popen[str]] = []

    def start(port: int) -> subprocess.Popen[str]:
        # The flags of a server, which rank 1 does not become.
        command = [sys.executable, "-m", "pagewick", "serve", *FLAGS]
        environment = {**os.environ, **variables_of(1, port)}
        started.append(subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_rank_1: Callable[[int], subprocess.Popen[str]]
) -> Iterator[tuple[Server, subprocess.Popen[str], int]]:
    """Return the server with rank 0, rank 1, and their port."""
    port = free_port()
    with monkeypatch.context() as environment:
        for name, value in variables_of(0, port).items():
            environment.setenv(name, value)
        server = Server(tmp_path, *FLAGS)
    try:
        rank_1 = start_rank_1(port)
        server.wait_until_ready()
        yield server, rank_1, port
    finally:
        server.let_go()


def complete(server: Server, num_tokens: int) -> httpx.Response:
    fields = {"prompt": "Pagewick is", "max_tokens": num_tokens, "ignore_eos": True}
    return server.http.post(COMPLETIONS, json=fields)


@pytest.mark.parametrize("is_working", [False, True])
def test_a_silent_rank_is_an_engine_that_died(
    is_working: bool,
    two_machines: tuple[Server, subprocess.Popen[str], int],
    start_rank_1: Callable[[int], subprocess.Popen[str]],
) -> None:
    server, rank_1, port = two_machines
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(complete(server, 2000)))
    if is_working:
        client.start()
        time.sleep(0.3)
    rank_1.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while server.http.get("/health").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if is_working:
        client.join()
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_dead"
    rank_1.kill()
    start_rank_1(port)
    while server.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert complete(server, 5).json()["usage"]["completion_tokens"] == 5
    assert any("rank 1 on 127.0.0.1 has given no sign of life" in trouble for trouble in server.troubles())


def test_a_rank_ends_with_a_server_that_is_silent(two_machines: tuple[Server, subprocess.Popen[str], int]) -> None:
    server, rank_1, _ = two_machines
    for process in (server.process, *server.children()):
        process.send_signal(signal.SIGSTOP)
    _, log = rank_1.communicate(timeout=DEADLINE_S)
    assert rank_1.returncode == 1 and "[rank 1] ERROR" in log
    assert "rank 0 on 127.0.0.1 has given no sign of life for" in log


def test_a_server_ends_its_ranks_in_order(two_machines: tuple[Server, subprocess.Popen[str], int]) -> None:
    server, rank_1, _ = two_machines
    server.stop()
    _, log = rank_1.communicate(timeout=DEADLINE_S)
    assert (rank_1.returncode, log) == (0, "")
    assert server.troubles() == []
