"""Ranks on several machines notice that one of them has ended or is silent, whatever they wait in."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import HashStore

from pagewick.parallel import heartbeat
from pagewick.parallel.heartbeat import Heartbeat, _Peer, begin_heartbeat
from pagewick.parallel.topology import detect_topology
from tests.parallel.heartbeat_worker import await_file
from tests.parallel.test_collectives import ENVIRON, free_port

WORLD_SIZE, SILENCE_S = 3, 2.0
# A limit for a machine that is busy with other work.
DEADLINE_S = 60.0


@contextmanager
def started(program: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ranks as on three machines, each of which has one process."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(WORLD_SIZE):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *program], env={**ENVIRON, **variables, **address}, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def beating(folder: Path, mode: str) -> list[str]:
    return ["tests.parallel.heartbeat_worker", str(folder), str(SILENCE_S), mode]


def await_ranks(folder: Path) -> None:
    for rank in range(WORLD_SIZE):
        await_file(folder / str(rank))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "no sign of life for")])
def test_a_lost_rank_ends_the_others_even_if_they_hang(
    victim: int, number: signal.Signals, how: str, tmp_path: Path
) -> None:
    with started(beating(tmp_path, "hang")) as ranks:
        await_ranks(tmp_path)
        ranks[victim].send_signal(number)
        for rank, process in enumerate(ranks):
            if rank != victim:
                _, log = process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 1
                assert f"rank {victim} on 127.0.0.1" in log and how in log and log.count("\n") == 1, log


@pytest.mark.parametrize("mode", ["work", "hello"])
def test_ranks_that_work_for_long_or_end_in_order_are_not_lost(mode: str, tmp_path: Path) -> None:
    with started(beating(tmp_path, mode)) as ranks:
        for process in ranks:
            out, log = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, out, log) == (0, "ended in order\n", "")


@pytest.mark.parametrize(("mode", "victim"), [("wait", 0), ("sum", 1)])
def test_a_silent_rank_ends_collectives(mode: str, victim: int, tmp_path: Path) -> None:
    """While others wait for a plan, and for a sum."""
    program = ["tests.parallel.gloo_worker", str(tmp_path), mode, str(SILENCE_S)]
    with started(program) as ranks:
        await_ranks(tmp_path)
        ranks[victim].send_signal(signal.SIGSTOP)
        for rank, process in enumerate(ranks):
            if rank != victim:
                _, log = process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 1 and f"rank {victim} on 127.0.0.1 has given no sign of life" in log


def test_ranks_of_one_machine_have_none() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert begin_heartbeat(HashStore(), detect_topology(variables), 15.0, 60.0) is None
    assert begin_heartbeat(HashStore(), detect_topology({}), 15.0, 60.0) is None


def test_a_rank_that_does_not_connect_is_an_error() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    with pytest.raises(TimeoutError):
        begin_heartbeat(HashStore(), detect_topology(variables), 15.0, 0.2)


class Watched:
    """A heartbeat whose other end is the test. ended: set when it would have ended the process."""

    def __init__(self, silence_s: float) -> None:
        self.ended = threading.Event()
        self.peer, connection = socket.socketpair()
        self.heartbeat = Heartbeat([_Peer(1, "there", connection)], silence_s, self.ended.set)

    def close(self) -> None:
        self.heartbeat.close()
        self.peer.close()


@contextmanager
def watched(silence_s: float = 0.0) -> Iterator[Watched]:
    found = Watched(silence_s)
    try:
        yield found
    finally:
        found.close()


def test_an_exception_may_end_the_process_first(caplog: pytest.LogCaptureFixture) -> None:
    with watched() as one:
        one.peer.close()
        deadline = time.monotonic() + DEADLINE_S
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        one.heartbeat.close()
        assert not one.ended.is_set()
    assert caplog.messages == [
        "rank 1 on there has ended, and its own log says why; this process ends with it: start that rank again"
    ]


def test_what_rank_0_says_is_passed_on(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_GRACE_S", 0.0)
    with watched() as one:
        for part in (b"\n\nrank 2 on the ", b"moon has ended", b"\n\n"):
            one.peer.sendall(part)
        assert one.ended.wait(DEADLINE_S)
    assert caplog.messages == ["rank 2 on the moon has ended; this process ends with it: start that rank again"]


def test_a_log_that_blocks_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_LAST_RESORT_S", 0.1)
    is_read = threading.Event()
    monkeypatch.setattr(heartbeat.logger, "error", lambda *given: is_read.wait(DEADLINE_S))
    with watched() as one:
        one.peer.close()
        assert one.ended.wait(DEADLINE_S / 2)
        is_read.set()


def test_silence_counts_only_with_a_limit(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_GRACE_S", 0.0)
    with watched(silence_s=0.0) as never, watched(silence_s=0.5) as soon:
        assert soon.ended.wait(DEADLINE_S)
        assert not never.ended.is_set()
        # Beats came all the time.
        assert set(never.peer.recv(100)) == {ord("\n")}
        assert len(soon.peer.recv(100).partition(b"rank")[0]) >= 2
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_rank_that_ends_in_order_says_so() -> None:
    with watched() as one:
        one.heartbeat.close(says_bye=True)
        with one.peer.makefile("rb") as stream:
            assert stream.read().endswith(b"\nbye\n")
    with watched() as one:
        one.peer.sendall(b"\nbye\n")
        one.peer.close()
        one.heartbeat._thread.join(DEADLINE_S)
        assert not one.heartbeat._thread.is_alive() and not one.ended.is_set()
