"""Opening: the beginning of a stream's response, sent while the model that it asks for is still being loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Message, Send

from pagewick.server.api.framing import DialectFraming
from pagewick.server.api.sse import STREAM_HEADERS
from pagewick.server.errors import ApiError


class Opening:
    """Begins a stream's response with pings, which the model's application then continues through `send`.

    Nothing is sent if the model is loaded within `interval_s` seconds, so that an error until then is an ordinary HTTP
    error. Once the response has begun, the head that the application sends is left out, and an error that it responds
    with is the stream's last event. framing: that of the stream; None if the response is not a stream, which gets no
    pings.
    """

    def __init__(self, framing: DialectFraming | None, interval_s: float, send: Send) -> None:
        self.is_begun = False
        self.late_status: int | None = None  # of an error after the beginning
        self._framing = framing
        self._interval_s = interval_s
        self._send = send
        self._error: bytearray | None = None  # the body of an error that the application responds with

    @asynccontextmanager
    async def pings(self) -> AsyncIterator[None]:
        """Send a ping every `interval_s` seconds until the block ends."""
        if self._framing is None:
            yield
            return
        is_over = asyncio.Event()
        pinging = asyncio.create_task(self._ping_until(is_over, self._framing))
        try:
            yield
        finally:
            # A ping under way is sent to its end: half of one would corrupt the stream.
            is_over.set()
            # An error means that the client has left, which the reader of its requests learns.
            await asyncio.gather(pinging, return_exceptions=True)

    async def send(self, message: Message) -> None:
        """Send a message of the application's response."""
        if not self.is_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            if message["status"] != 200:
                self._error, self.late_status = bytearray(), message["status"]
        elif self._error is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(msgspec.Raw(bytes(self._error)))

    async def fail(self, error: ApiError) -> None:
        """End a response that has begun with an error."""
        assert self._framing is not None, "only a stream begins with pings"
        self.late_status = error.status
        await self._end(self._framing.error_body(error))

    async def _ping_until(self, is_over: asyncio.Event, framing: DialectFraming) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await is_over.wait()
                return
            except TimeoutError:
                if not self.is_begun:
                    self.is_begun = True
                    await self._send(_head(framing))
                await self._send({"type": "http.response.body", "body": framing.ping, "more_body": True})

    async def _end(self, body: object) -> None:
        assert self._framing is not None, "only a stream begins with pings"
        event = self._framing.error_event(body)
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _head(framing: DialectFraming) -> Message:
    response = Response(headers=STREAM_HEADERS, media_type=framing.media_type)
    del response.headers["content-length"]
    return {"type": "http.response.start", "status": 200, "headers": response.raw_headers}
