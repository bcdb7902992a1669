"""Server-sent events, and what happens when the client leaves: the work for it is cancelled at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewick.log import get_logger
from pagewick.server.errors import api_error

KEEP_ALIVE_S = 10.0
# A client that takes nothing for so long, with all buffers full, is gone.
WRITE_TIMEOUT_S = 60.0
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_logger = get_logger(__name__)
_encoder = msgspec.json.Encoder()
_Result = TypeVar("_Result")


def event(data: Any) -> bytes:
    """One event. JSON has no line breaks of its own, so one line holds it."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields, each as an event, then `[DONE]`.

    The response starts with the first event, so that an error before it is an ordinary HTTP error; later ones become an
    error event. If nothing comes for `keep_alive_s` seconds, a comment keeps the connection open. When the client
    leaves, the generator is closed, and so is whatever it holds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[Any],
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s
        self._is_started = False
        # X-Accel-Buffering: nginx would collect events instead of passing them on.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await self._send_events(send, gone)
        except TimeoutError:
            _logger.info("a client stopped reading; its request is aborted")
        finally:
            gone.cancel()
            await self._chunks.aclose()

    async def _send_events(self, send: Send, gone: asyncio.Task[None]) -> None:
        while True:
            try:
                chunk = await self._next_chunk(send, gone)
            except (StopAsyncIteration, ClientDisconnect) as end:
                if isinstance(end, StopAsyncIteration):
                    await self._send(send, DONE, is_last=True)
                return
            # A border: whatever went wrong, a client that already reads events must be told in an event.
            except Exception as error:
                if not self._is_started:
                    raise
                failure = api_error(error)
                if failure.status == 500:
                    _logger.error("a request failed while it was streamed", exc_info=error)
                await self._send(send, event(failure.body), is_last=True)
                return
            await self._send(send, event(chunk))

    async def _next_chunk(self, send: Send, gone: asyncio.Task[None]) -> Any:
        """The next chunk; meanwhile pings. Raises ClientDisconnect, or what the generator raises."""
        chunk: asyncio.Task[Any] = asyncio.ensure_future(anext(self._chunks))
        try:
            while True:
                await asyncio.wait({chunk, gone}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientDisconnect
                if chunk.done():
                    return chunk.result()
                await self._send(send, PING)
        finally:
            await _cancel(chunk)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            if not self._is_started:
                self._is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def run_while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The work's result. Raises ClientDisconnect, and cancels the work, when the client leaves first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        await _cancel(task)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
