"""Streams of events, whose work is cancelled at once when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewick.log import get_logger
from pagewick.outputs import PartKind
from pagewick.server.api.framing import ChunkTemplate, Following, Framing
from pagewick.server.errors import api_error
from pagewick.server.guard.connections import WRITE_CHUNK
from pagewick.text.output_stream import ChoiceDelta

# While more than this waits to be sent, no further events are made.
OUTBOX_BYTES = 64 * 2**10

# X-Accel-Buffering: nginx would collect events instead of passing them on.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# Looked up once: see outputs.py.
_TEXT = PartKind.TEXT

_logger = get_logger(__name__)
_Result = TypeVar("_Result")


class EventStream(Response):
    """Sends the chunks that a generator yields, each framed as the dialect has it, and then the framing's end.

    In place of a Generation's chunks, the generator may yield a Following.

    The response starts with the first byte, so that an error before it is an ordinary HTTP error; a later one is sent
    in the framing's form. If nothing comes for `keep_alive_s` seconds, a ping keeps the connection open. While
    OUTBOX_BYTES wait for a slow client, the generator is not asked for more. A client that reads nothing at all is cut
    by its GuardedConnection; here that looks like any client that leaves. Then the generator is closed, with all that
    it holds. on_end: called when everything is over, whatever happened.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Any],
        framing: Framing,
        *,
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = framing.media_type
        self._chunks = chunks
        self._framing = framing
        self._keep_alive_s = keep_alive_s
        self._on_end = on_end
        self.init_headers({**STREAM_HEADERS, **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_wait_until_gone(receive))
        outbox = _Outbox(send, self.raw_headers, scope.get("extensions", {}).get(WRITE_CHUNK))
        making = asyncio.create_task(self._make_events(outbox, gone))
        try:
            await self._watch_making(making, gone, outbox)
            await _watch({outbox.sending}, gone, outbox)
        except ClientDisconnect:
            pass
        finally:
            gone.cancel()
            cleaning = asyncio.create_task(self._clean_up(making, outbox))
            await _until_done(cleaning)
            cleaning.result()

    async def _clean_up(self, making: asyncio.Task[None], outbox: _Outbox) -> None:
        try:
            await _cancel(outbox.sending)
            await _cancel(making)
            if not making.cancelled() and (error := making.exception()):
                # The client that this error concerns has left.
                _logger.debug("a stream whose client had left ended in an error", exc_info=error)
        finally:
            try:
                await self._chunks.aclose()
            finally:
                if self._on_end is not None:
                    self._on_end()

    async def _make_events(self, outbox: _Outbox, gone: asyncio.Task[None]) -> None:
        """Put every chunk into the outbox. Raises an error of the generator only before the response has begun."""
        try:
            async for chunk in self._chunks:
                if gone.done():
                    return
                if isinstance(chunk, Following):
                    await self._follow(chunk, outbox)
                    continue
                if not outbox.put(self._framing.frame(chunk)):
                    await outbox.until_taken()
            outbox.put(self._framing.end, is_last=True)
        except ClientDisconnect:
            raise
        # Whatever went wrong, a client that already reads events must learn of it from an event.
        except Exception as error:
            if not outbox.is_started:
                raise
            failure = api_error(error)
            if failure.status == 500:
                _logger.error("a request failed while it was streamed", exc_info=error)
            outbox.put(self._framing.error(failure), is_last=True)

    async def _follow(self, following: Following, outbox: _Outbox) -> None:
        """Put the chunks of all deltas into the outbox. An error is the generator's, which then knows how it ends."""
        try:
            await following.generation.pass_to(_Follower(following, self._framing, outbox))
        except Exception as error:
            await self._chunks.athrow(error)

    async def _watch_making(self, making: asyncio.Task[None], gone: asyncio.Task[None], outbox: _Outbox) -> None:
        """Wait until all events are made, and put in pings meanwhile. Raises what `making` raises, and as `_watch`."""
        loop = asyncio.get_running_loop()
        quiet_since = loop.time()
        while not making.done():
            await _watch({making}, gone, outbox, max(0.0, quiet_since + self._keep_alive_s - loop.time()))
            quiet_since = max(quiet_since, outbox.filled_at)
            if not making.done() and loop.time() - quiet_since >= self._keep_alive_s:
                quiet_since = loop.time()
                if not outbox.num_unsent:
                    outbox.put(self._framing.ping)
        making.result()


class _Follower:
    """A Reader that puts what it reads into an outbox."""

    def __init__(self, following: Following, framing: Framing, outbox: _Outbox) -> None:
        self._following = following
        self._frame = framing.frame
        self._templates: dict[int, ChunkTemplate] = {}  # by choice, once it has had its first delta
        self._put = outbox.put
        self.until_ready = outbox.until_taken

    def take(self, delta: ChoiceDelta) -> bool:
        template, parts = self._templates.get(delta.index), delta.parts
        if template is not None and len(parts) == 1 and parts[0].kind is _TEXT and delta.finish_reason is None:
            return self._put(template.framed(parts[0].text))
        if template is None and self._following.text_chunk is not None:
            chunk_of = partial(self._following.text_chunk, delta.index)
            self._templates[delta.index] = ChunkTemplate(chunk_of, self._frame)
        chunks = b"".join(map(self._frame, self._following.chunks_of(delta)))
        return not chunks or self._put(chunks)


class _Outbox:
    """Sends what is put into it, in order; all that has gathered while `send` was busy goes as one piece.

    write_chunk: writes to the client's connection at once if that takes more, else returns False. None: there is none.

    sending: a task that ends with the last piece, or raises what `send` raises. filled_at: time of the latest `put` on
    the event loop's clock.
    """

    def __init__(
        self, send: Send, headers: list[tuple[bytes, bytes]], write_chunk: Callable[[bytes], bool] | None
    ) -> None:
        self.is_started = False
        self.filled_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._headers = headers
        self._write_chunk = write_chunk
        self._is_idle = False  # everything so far has been sent, the response's start included
        self._unsent = bytearray()
        self._is_complete = False
        self._is_filled = asyncio.Event()
        self._is_taken = asyncio.Event()
        self.sending = asyncio.create_task(self._send_all())

    @property
    def num_unsent(self) -> int:
        """Number of bytes that `send` has not been given yet."""
        return len(self._unsent)

    def put(self, body: bytes, *, is_last: bool = False) -> bool:
        """Return whether there is room for more; `until_taken` waits for it."""
        self.is_started = True
        self.filled_at = self._loop.time()
        if self._is_idle and not is_last and self._write_chunk is not None and self._write_chunk(body):
            return True
        self._is_idle = False
        self._unsent += body
        self._is_complete = is_last
        self._is_filled.set()
        self._is_taken.clear()
        return len(self._unsent) <= OUTBOX_BYTES

    async def until_taken(self) -> None:
        """Wait until `send` has been given everything."""
        await self._is_taken.wait()

    async def _send_all(self) -> None:
        await self._is_filled.wait()
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        is_last = False
        while not is_last:
            await self._is_filled.wait()
            self._is_filled.clear()
            self._is_idle = False
            self._is_taken.set()
            body, is_last = bytes(self._unsent), self._is_complete
            self._unsent.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
            self._is_idle = not self._unsent


async def run_while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the work's result. If the client leaves first, cancels the work and raises ClientDisconnect."""
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


async def _watch(
    tasks: set[asyncio.Task[Any]], gone: asyncio.Task[None], outbox: _Outbox, timeout_s: float | None = None
) -> None:
    """Wait for one of the tasks, or for the timeout. Raises ClientDisconnect, or what sending raises."""
    waited = {*tasks, gone, outbox.sending}
    await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        raise ClientDisconnect
    if outbox.sending.done():
        outbox.sending.result()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        await _until_done(task)


async def _until_done(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task. A cancellation of this one meanwhile is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
