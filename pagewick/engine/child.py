"""EngineChild: the engine process and its ranks, as its parent sees them, from start to end. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process

import psutil

from pagewick.child_processes import module_command
from pagewick.engine.progress import PROGRESS_VARIABLE, Progress
from pagewick.log import child_environment, get_logger

ENGINE_MODULE = "pagewick.engine_process"

# Seconds to wait for the exit status once the connection has ended by itself.
_STATUS_GRACE_S = 1.0
# Seconds for the other ranks to end after the engine process, which the kernel makes them do; then they are killed.
_RANKS_GRACE_S = 2.0
_RANKS_INTERVAL_S = 0.02
# Seconds for a killed process to end, which takes time if it has much memory.
_KILLED_GRACE_S = 20.0

_logger = get_logger(__name__)


class _LateEnds(logging.Filter):
    """Drops asyncio's warning that an engine process ended after its event loop, as it does if nobody closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: set[int] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_late = str(record.msg).startswith("Loop %r that handles pid") and isinstance(record.args, tuple)
        return not is_late or self.pids.isdisjoint(arg for arg in record.args or () if isinstance(arg, int))


_late_ends = _LateEnds()
logging.getLogger("asyncio").addFilter(_late_ends)


class EngineChild:
    """One engine process. Created by `start`; `end` must be called. progress: the memory that it shares with us."""

    def __init__(self, process: Process, progress: Progress) -> None:
        self.process = process
        self.progress = progress
        self._ranks: list[psutil.Process] = []

    @classmethod
    async def start(cls, module: str = ENGINE_MODULE) -> tuple[EngineChild, StreamReader, StreamWriter]:
        """Start the process, and return it with the streams of our end of a socket pair. Raises OSError."""
        progress = Progress.shared()
        ours, theirs = socket.socketpair()
        spawning = asyncio.create_task(_spawn(module, theirs, progress))
        try:
            # If this start were cancelled half-way, nobody would know the new process.
            await asyncio.shield(spawning)
            return cls(spawning.result(), progress), *await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            with contextlib.suppress(OSError):
                await cls(await spawning, progress).end(0.0)
            progress.close()
            raise
        finally:
            theirs.close()
            progress.close_file()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine process and of the other ranks that it has started on this machine."""
        return [self.process.pid, *(rank.pid for rank in self._ranks)]

    async def find_ranks(self) -> None:
        """Find the ranks, once all of them run, so that they are known even when the engine process is gone."""
        with contextlib.suppress(psutil.Error):
            self._ranks = await asyncio.to_thread(psutil.Process(self.process.pid).children, recursive=True)

    def kill(self) -> None:
        """Kill it and its ranks at once, even if they are stopped."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        for rank in self._ranks:
            with contextlib.suppress(psutil.Error):
                rank.kill()

    async def end(self, grace_s: float) -> None:
        """Wait until it and all its ranks have ended; after grace_s seconds kill the others. Closes `progress`."""
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
            async with asyncio.timeout(_RANKS_GRACE_S):
                await self._ranks_gone()
        except TimeoutError:
            self.kill()
            await self._killed()
        self.progress.close()

    async def _killed(self) -> None:
        try:
            async with asyncio.timeout(_KILLED_GRACE_S):
                await self.process.wait()
                await self._ranks_gone()
        except TimeoutError:
            # A driver or a disk blocks it, and nothing more can be done.
            numbers = ", ".join(map(str, self.process_ids))
            _logger.error("the engine was killed, but its processes have not ended (%s)", numbers)

    async def how_it_ended(self) -> str:
        """Say why the connection ended, as far as the exit status tells."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_GRACE_S):
                await self.process.wait()
        status = self.process.returncode
        if status == -signal.SIGKILL:
            return "the engine process was killed, by hand or because the machine has no memory left"
        how = "" if status is None else f" with exit status {status}"
        return f"the engine process ended unexpectedly{how}; see the log"

    async def _ranks_gone(self) -> None:
        while any(_is_running(rank) for rank in self._ranks):
            await asyncio.sleep(_RANKS_INTERVAL_S)


async def _spawn(module: str, connection: socket.socket, progress: Progress) -> Process:
    assert progress.file is not None, "its file is open until the child has it"
    inherited = (connection.fileno(), progress.file)
    process = await asyncio.create_subprocess_exec(
        *(*module_command(), module, str(connection.fileno()), str(os.getpid())),
        # In a separate session, so that Ctrl-C reaches this process only, which then ends the engine properly.
        start_new_session=True,
        pass_fds=inherited,
        env={**os.environ, **child_environment(), PROGRESS_VARIABLE: str(progress.file)},
    )
    _late_ends.pids.add(process.pid)
    return process


def _is_running(process: psutil.Process) -> bool:
    """Whether a process still runs. A zombie, which only waits for its parent to read its exit status, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
