"""Starting and stopping: requests that cannot be served now are asked to come again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewick.server.errors import ApiError

# Seconds after which a client may come again: by then the model is loaded, or another server has the address.
RETRY_AFTER_S = 5
# How long responses that were cut short have to reach their clients.
LAST_RESPONSES_S = 0.5
# Probes and scrapes are answered until the end.
WATCHED = ("/health", "/health/live", "/health/ready", "/metrics")


class Lifecycle:
    """Counts the requests in flight, and knows whether new ones are still taken."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def drain(self) -> None:
        """Refuse new requests; those in flight go on."""
        self.is_draining = True

    async def until_idle(self) -> None:
        await self._idle.wait()

    def enter(self) -> None:
        self.num_in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self._idle.set()


class Doorkeeper:
    """Counts requests in and out, and turns new ones away while the server is stopping."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in WATCHED:
            await self._app(scope, receive, send)
            return
        if self._lifecycle.is_draining:
            message = "the server is shutting down; send the request again, to another server"
            await _unavailable(message, "draining").response(scope)(scope, receive, send)
            return
        self._lifecycle.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.leave()


class Stage:
    """An application that is exchanged once the model is loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def _unavailable(message: str, code: str) -> ApiError:
    """A 503 after which the connection is closed, so that the next request finds another server or a loaded one."""
    headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
    return ApiError(503, message, type="service_unavailable_error", code=code, headers=headers)


async def loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The application while the model loads: it asks every client but the liveness probe to come again."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/health/live":
        response: Response = JSONResponse({"status": "loading"})
    else:
        response = _unavailable("the model is loading; try again in some seconds", "loading").response(scope)
    await response(scope, receive, send)


def stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return events that the first and the second SIGINT or SIGTERM set."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    return stop, hurry


async def first_done(*works: Awaitable[Any]) -> Any:
    """Return the result of the work that is done first; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
