"""The HTTP server: uvicorn behind GuardedConnections, without its signal handlers, and asleep while idle."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagewick.server.guard.connections import GuardedConnection
from pagewick.server.guard.response_events import ResponseEvents
from pagewick.server.guard.watch import Watch
from pagewick.server.settings import ServerSettings
from pagewick.server.tally import Tally

# uvicorn's own timer must never be the one that ends an idle connection: GuardedConnection does that.
_NEVER_S = 7 * 24 * 3600


class HttpServer(uvicorn.Server):
    """Serves an application until `leave` is called. uvicorn speaks HTTP; GuardedConnection decides what it hears.

    connections: counts those of the server; None: no other process has any. graceful_s: seconds that clients get after
    `leave` to read their responses; None: no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        connections: Tally | None = None,
        graceful_s: int | None = 1,
    ) -> None:
        options: dict[str, Any] = {
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "date_header": False,  # uvicorn would wake up ten times a second for it
            "proxy_headers": False,  # a client's claim about its address decides nothing here
            "timeout_keep_alive": _NEVER_S,
            "timeout_graceful_shutdown": graceful_s,
        }
        inner = uvicorn.Config(ResponseEvents(app), http="httptools", **options)
        inner.load()
        watch = Watch(settings, connections or Tally())
        guarded: Any = partial(GuardedConnection, inner.http_protocol_class, settings, watch)
        super().__init__(uvicorn.Config(ResponseEvents(app), http=guarded, **options))
        self._left = asyncio.Event()

    def leave(self) -> None:
        """Finish the responses under way, and stop."""
        self.should_exit = True
        self._left.set()

    async def main_loop(self) -> None:
        """Wait without uvicorn's clock, which wakes ten times a second."""
        await self._left.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process' signals to its owner."""
        yield
