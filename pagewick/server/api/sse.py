"""Server-sent events, and what happens when the client leaves: the work for it is cancelled at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagewick.log import get_logger
from pagewick.server.errors import api_error

KEEP_ALIVE_S = 10.0
# A client that takes nothing for so long, with all buffers full, is gone.
WRITE_TIMEOUT_S = 60.0
# What is made for a client that does not keep up waits here; one that is so far behind will not catch up.
MAX_UNSENT_BYTES = 2**20
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_logger = get_logger(__name__)
_encoder = msgspec.json.Encoder()
_Result = TypeVar("_Result")


def event(data: Any) -> bytes:
    """One event. JSON has no line breaks of its own, so one line holds it."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


class SlowReaderError(Exception):
    """The client takes too little of its answer, or nothing."""


class EventStream(Response):
    """Sends what a generator yields, each as an event, then `[DONE]`.

    The response starts with the first event, so that an error before it is an ordinary HTTP error; later ones become an
    error event. If nothing comes for `keep_alive_s` seconds, a comment keeps the connection open. When the client
    leaves, takes nothing for `write_timeout_s` seconds or falls behind by more than MAX_UNSENT_BYTES, the generator is
    closed, and so is whatever it holds. on_end: called when all is over, whatever happened.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[Any],
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._on_end = on_end
        # X-Accel-Buffering: nginx would collect events instead of passing them on.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_until_gone(receive))
        outbox = _Outbox(send, self.raw_headers, self._write_timeout_s)
        try:
            await self._make_events(outbox, gone)
            await outbox.flush(gone)
        except ClientDisconnect:
            pass
        except SlowReaderError as error:
            _logger.info("a client %s; its request is aborted", error)
        finally:
            gone.cancel()
            await outbox.close()
            await self._chunks.aclose()
            if self._on_end is not None:
                self._on_end()

    async def _make_events(self, outbox: _Outbox, gone: asyncio.Task[None]) -> None:
        while True:
            try:
                chunk = await self._next_chunk(outbox, gone)
            except StopAsyncIteration:
                outbox.put(DONE, is_last=True)
                return
            except (ClientDisconnect, SlowReaderError):
                raise
            # A border: whatever went wrong, a client that already reads events must be told in an event.
            except Exception as error:
                if not outbox.is_started:
                    raise
                failure = api_error(error)
                if failure.status == 500:
                    _logger.error("a request failed while it was streamed", exc_info=error)
                outbox.put(event(failure.body), is_last=True)
                return
            outbox.put(event(chunk))

    async def _next_chunk(self, outbox: _Outbox, gone: asyncio.Task[None]) -> Any:
        """The next chunk; meanwhile pings. Raises ClientDisconnect, SlowReaderError, or what the generator raises."""
        chunk: asyncio.Task[Any] = asyncio.ensure_future(anext(self._chunks))
        try:
            while True:
                await asyncio.wait(
                    {chunk, gone, outbox.sending}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    raise ClientDisconnect
                if outbox.sending.done():
                    outbox.sending.result()
                if chunk.done():
                    return chunk.result()
                if not outbox.num_unsent:
                    outbox.put(PING)
        finally:
            await _cancel(chunk)


class _Outbox:
    """Sends what is put into it, in order and in as few pieces as the client's reading makes of it.

    sending: ends with the last piece, or raises SlowReaderError, or what `send` raises.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], write_timeout_s: float) -> None:
        self.is_started = False
        self._send = send
        self._headers = headers
        self._write_timeout_s = write_timeout_s
        self._unsent = bytearray()
        self._is_complete = False
        self._is_filled = asyncio.Event()
        self.sending = asyncio.create_task(self._send_all())

    @property
    def num_unsent(self) -> int:
        """Bytes."""
        return len(self._unsent)

    def put(self, body: bytes, *, is_last: bool = False) -> None:
        """Raises SlowReaderError if too much waits already."""
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise SlowReaderError(f"fell behind by more than {MAX_UNSENT_BYTES} bytes")
        self.is_started = True
        self._unsent += body
        self._is_complete = is_last
        self._is_filled.set()

    async def flush(self, gone: asyncio.Task[None]) -> None:
        """Wait until the last piece is sent, or the client has left."""
        await asyncio.wait({self.sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        if self.sending.done():
            self.sending.result()

    async def close(self) -> None:
        await _cancel(self.sending)

    async def _send_all(self) -> None:
        try:
            await self._is_filled.wait()
            await self._say({"type": "http.response.start", "status": 200, "headers": self._headers})
            is_last = False
            while not is_last:
                await self._is_filled.wait()
                self._is_filled.clear()
                body, is_last = bytes(self._unsent), self._is_complete
                self._unsent.clear()
                await self._say({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError:
            raise SlowReaderError(f"took nothing for {self._write_timeout_s:g} seconds") from None

    async def _say(self, message: Message) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await self._send(message)


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
