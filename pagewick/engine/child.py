"""EngineChild: the engine process as its parent sees it, from start to end, with all its ranks. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process

import psutil

from pagewick.engine.progress import PROGRESS_VARIABLE, Progress
from pagewick.log import child_environment, get_logger
from pagewick.parallel.launch import module_command

ENGINE_MODULE = "pagewick.engine_process"

# How long its exit status is waited for once the connection has ended by itself.
_STATUS_GRACE_S = 1.0
# How long the other ranks may take to follow the engine process, which the kernel sees to; then they are killed.
_RANKS_GRACE_S = 2.0
_RANKS_INTERVAL_S = 0.02
# How long one that was killed may take, with all its memory.
_KILLED_GRACE_S = 20.0

_logger = get_logger(__name__)


class EngineChild:
    """One engine process. Made by `start`; `end` must be called in the end. progress: what it shares with us."""

    def __init__(self, process: Process, progress: Progress) -> None:
        self.process = process
        self.progress = progress
        self._ranks: list[psutil.Process] = []

    @classmethod
    async def start(cls, module: str = ENGINE_MODULE) -> tuple[EngineChild, StreamReader, StreamWriter]:
        """Start the process; it and these streams are the two ends of a connection without a name. Raises OSError."""
        progress = Progress.shared()
        ours, theirs = socket.socketpair()
        spawning = asyncio.create_task(_spawn(module, theirs, progress))
        try:
            # A start that is cancelled half-way would leave a process that nobody knows.
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
        """The engine process and the other ranks of this machine that it has started."""
        return [self.process.pid, *(rank.pid for rank in self._ranks)]

    async def find_ranks(self) -> None:
        """To be called once all ranks run: from now on they are known, even when the engine process is gone."""
        with contextlib.suppress(psutil.Error):
            self._ranks = await asyncio.to_thread(psutil.Process(self.process.pid).children, recursive=True)

    def kill(self) -> None:
        """End it and its ranks at once, also where they are stopped."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        for rank in self._ranks:
            with contextlib.suppress(psutil.Error):
                rank.kill()

    async def end(self, grace_s: float) -> None:
        """Wait until it has ended with all its ranks; what has not after so many seconds is killed.

        What it shared with us is closed then.
        """
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
            # A driver or a disk holds it; nobody could do more.
            numbers = ", ".join(map(str, self.process_ids))
            _logger.error("the engine was killed, but the system does not let it go (processes %s)", numbers)

    async def how_it_ended(self) -> str:
        """Why the connection ended, as far as the exit status tells it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_GRACE_S):
                await self.process.wait()
        status = self.process.returncode
        if status == -signal.SIGKILL:
            return "the engine process was killed, by hand or because the machine has no memory left"
        how = "" if status is None else f" with exit status {status}"
        return f"the engine process ended unexpectedly{how}; its last words are in the log"

    async def _ranks_gone(self) -> None:
        while any(_is_running(rank) for rank in self._ranks):
            await asyncio.sleep(_RANKS_INTERVAL_S)


async def _spawn(module: str, connection: socket.socket, progress: Progress) -> Process:
    assert progress.file is not None, "its file is open until the child has it"
    inherited = (connection.fileno(), progress.file)
    return await asyncio.create_subprocess_exec(
        *(*module_command(), module, str(connection.fileno()), str(os.getpid())),
        # A session of its own: Ctrl-C reaches this process only, which then ends the engine in order.
        start_new_session=True,
        pass_fds=inherited,
        env={**os.environ, **child_environment(), PROGRESS_VARIABLE: str(progress.file)},
    )


def _is_running(process: psutil.Process) -> bool:
    """One that nobody has asked for its exit status is no more than that."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
