"""Member: one of the API processes of a server, which is started again whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass

from pagewick.child_processes import module_command
from pagewick.engine.supervisor import Delays, Timing
from pagewick.errors import EngineDeadError
from pagewick.log import child_environment, get_logger, one_line
from pagewick.server.hub.connection import Connection
from pagewick.server.hub.counts import SharedCounts
from pagewick.server.hub.liveness import until_hung
from pagewick.server.hub.messages import Close, Drain, FromApi, Setup, decode_from_api
from pagewick.server.hub.peer import Peer
from pagewick.server.hub.state import HubState
from pagewick.server.lifecycle import first_done

API_MODULE = "pagewick.server.hub.api_process"
# Seconds for a process to end by itself, once its connection has ended.
_EXIT_GRACE_S = 1.0

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The open files that every API process inherits: the socket that listens, and the file of the shared counts."""

    listener: socket.socket
    counts_file: int


class Member:
    """One API process. make_setup: called for each start, with whether it is the first.

    hang_timeout_s: seconds without a response after which it is killed and started again; 0 is never.
    started: done once the first process has loaded; if it cannot load, has the exception.
    """

    def __init__(
        self,
        index: int,
        inheritance: Inheritance,
        counts: SharedCounts,
        state: HubState,
        make_setup: Callable[[bool], Setup],
        hang_timeout_s: float,
    ) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.peer: Peer | None = None
        self._index = index
        self._name = f"API process {index}"
        self._inheritance = inheritance
        self._counts = counts
        self._state = state
        self._make_setup = make_setup
        self._hang_timeout_s = hang_timeout_s
        self._closing = asyncio.Event()
        self._is_draining = False

    async def keep_running(self) -> None:
        """Run the process until `close`. One that ends after `drain` has nothing to do any more."""
        delays = Delays(Timing())
        while not self._closing.is_set() and not self._is_draining:
            began = time.monotonic()
            try:
                await self._run_once()
            # Any exception: a server must not lack an API process because of an error that nobody expected.
            except Exception as error:
                if not self.started.done():
                    self.started.set_exception(error)
                    return
                _logger.error("%s could not be started: %s", self._name, one_line(error))
            delay_s = delays.take(time.monotonic() - began)
            await first_done(self._closing.wait(), asyncio.sleep(delay_s))

    def drain(self) -> None:
        """Let the process refuse new requests; `Peer.idle` is set once none is in flight."""
        self._is_draining = True
        if self.peer is not None:
            self.peer.send(Drain())

    def close(self) -> None:
        """Let the process end the requests in flight, and end; it is not started again."""
        self._closing.set()
        if self.peer is not None:
            self.peer.send(Close())

    async def _run_once(self) -> None:
        """Start the process, and return when it has ended. Raises the error it sent, EngineDeadError, OSError."""
        process, connection = await _launch(self._index, self._inheritance)
        hang = None
        peer = self.peer = Peer(connection, self._state.conversations, self._state.reports, self._state.responses)
        peer.loaded.add_done_callback(self._note_loaded)
        try:
            peer.send(self._make_setup(not self.started.done()))
            if self._closing.is_set() or self._is_draining:
                peer.send(Close())
            hang = await first_done(peer.listen(), until_hung(process.pid, peer, self._name, self._hang_timeout_s))
        finally:
            self.peer = None
            num_lost = peer.num_running
            self._state.part_with(self._index, peer)
            how = await _end_of(process, hang)
            self._counts.clear(self._index)
        if self._closing.is_set():
            return
        if not peer.loaded.done():
            raise EngineDeadError(f"an API process {how} before it had loaded; see the log")
        if (failure := peer.loaded.exception()) is not None:
            raise failure
        again = "" if self._is_draining else "; it is started again"
        _logger.error("%s %s%s. Requests that are lost: %d", self._name, how, again, num_lost)

    def _note_loaded(self, loaded: asyncio.Future[None]) -> None:
        if loaded.exception() is None and self.peer is not None:
            self._state.admit(self._index, self.peer)
            if not self.started.done():
                self.started.set_result(None)


async def _launch(index: int, inheritance: Inheritance) -> tuple[Process, Connection[FromApi]]:
    """Start an API process, and return it with our end of a socket pair. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        inherited = (theirs.fileno(), inheritance.listener.fileno(), inheritance.counts_file)
        arguments = map(str, (*inherited, index, os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                *(*module_command(), API_MODULE, *arguments),
                # In a separate session, so that Ctrl-C reaches the hub only, which then ends all in order.
                start_new_session=True,
                pass_fds=inherited,
                env={**os.environ, **child_environment()},
            )
        except BaseException:
            ours.close()
            raise
    return process, Connection(*await asyncio.open_connection(sock=ours), decode_from_api)


async def _end_of(process: Process, hang: str | None) -> str:
    """Wait until a process has ended, or kill it; return how it ended. Its connection has ended already.

    hang: how long it has hung, if so; then it is killed at once.
    """
    if hang is not None:
        process.kill()
        await process.wait()
        return f"{hang} and was killed"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_GRACE_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    status = process.returncode
    if status == -signal.SIGKILL:
        return "was killed (by hand, or because the machine has no memory left)"
    return f"ended with exit status {status}"
