"""uvicorn, but the signals are ours, and it sleeps until somebody wants something.

Written against uvicorn 0.30 to 0.54, whose Server wakes ten times a second to look at its clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from email.utils import formatdate

import uvicorn
from uvicorn.server import ServerState


class HttpServer(uvicorn.Server):
    """Serves until `leave` is called."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = _DatedState()
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Finish what is being answered, and stop."""
        self.should_exit = True
        self._left.set()

    async def main_loop(self) -> None:
        await self._left.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _DatedState(ServerState):
    """The headers of every response are the date's, made when it is asked for and kept for a second."""

    def __init__(self) -> None:
        self._second = 0
        self._headers: list[tuple[bytes, bytes]] = []
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        if (second := int(time.time())) != self._second:
            self._second, self._headers = second, [(b"date", formatdate(second, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, value: list[tuple[bytes, bytes]]) -> None:
        """uvicorn's own, which are empty."""
