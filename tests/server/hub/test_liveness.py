"""The hub asks API processes for their counts, notices one that hangs, and starts none again while it drains."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from pagewick.server.core.conversations import Conversations
from pagewick.server.hub import liveness, state
from pagewick.server.hub.connection import Connection
from pagewick.server.hub.counts import SharedCounts
from pagewick.server.hub.member import Inheritance, Member
from pagewick.server.hub.messages import FromHub, Report, Serving, decode_from_api, decode_from_hub, raw
from pagewick.server.hub.peer import Peer
from pagewick.server.hub.state import HubState
from pagewick.server.telemetry.metric_sums import Family

COUNTS = [Family("app:requests", "Requests.", "counter", [("app:requests_total", {}, 3.0)])]


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOOK_INTERVAL_S", 0.01)


@pytest.fixture
def stopped_process() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
        process.kill()


def run(test: Callable[[Peer, Connection[FromHub]], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a peer and the other end of its connection."""

    async def with_ends() -> None:
        async def reports() -> list[msgspec.Raw]:
            return []

        ours, theirs = socket.socketpair()
        end: Connection[FromHub] = Connection(*await asyncio.open_connection(sock=theirs), decode_from_hub)
        peer = Peer(
            Connection(*await asyncio.open_connection(sock=ours), decode_from_api), Conversations(60.0), reports
        )
        listening = asyncio.create_task(peer.listen())
        await test(peer, end)
        peer.close()
        end.close()
        await listening

    asyncio.run(with_ends())


def test_a_stopped_process_that_owes_a_report_hangs(stopped_process: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test(peer: Peer, end: Connection[FromHub]) -> None:
        assert (await liveness.until_hung(stopped_process, peer, "A", 0.2)).startswith("did not respond for")

    run(test)
    assert "A has not responded for" in caplog.text


def test_a_limit_of_0_is_none(stopped_process: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test(peer: Peer, end: Connection[FromHub]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(liveness.until_hung(stopped_process, peer, "A", 0), 0.2)

    run(test)


def test_a_process_that_reports_does_not_hang_and_its_counts_are_known_without_a_scrape() -> None:
    async def test(peer: Peer, end: Connection[FromHub]) -> None:
        watching = asyncio.create_task(liveness.until_hung(os.getpid(), peer, "A", 0.05))
        for number in range(12):
            assert await end.receive()
            end.send(Report(raw([number])))
        while peer.report != raw([11]):
            await asyncio.sleep(0)
        assert not watching.done()
        watching.cancel()

    run(test)


def test_a_scrape_does_not_wait_again_for_a_process_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_REPORT_S", 0.01)
    hub = HubState(60.0, "model")

    async def test(peer: Peer, end: Connection[FromHub]) -> None:
        end.send(Report(raw(COUNTS)))
        end.send(Serving())
        await peer.serving.wait()
        hub.admit(0, peer)
        assert (await hub.reports())[-1] == raw(COUNTS)
        again = hub.reports()
        with pytest.raises(StopIteration) as found:
            again.send(None)  # it returns without a pause
        assert found.value.value[-1] == raw(COUNTS)

    run(test)


def test_a_process_that_ends_while_the_server_drains_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        file = SharedCounts.create_file(1)
        with socket.socket() as listener:
            inheritance = Inheritance(listener, file)
            member = Member(0, inheritance, SharedCounts(file), HubState(60.0, "model"), lambda is_first: None, 0.0)  # type: ignore[arg-type, return-value]
            starts = []

            async def run_once() -> None:
                starts.append(1)
                if len(starts) == 2:
                    member.drain()

            monkeypatch.setattr(member, "_run_once", run_once)
            await asyncio.wait_for(member.keep_running(), 60)
            assert len(starts) == 2
        os.close(file)

    asyncio.run(test())
