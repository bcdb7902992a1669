"""One streamed request to an OpenAI-compatible server, timed.

The client uses little processor time, so that it does not slow down a server on the same machine. Each request has its
own connection, and its time starts before that is opened.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import httptools

from pagewick.cli.benchmarking.measurement import RequestTiming
from pagewick.cli.response_chunk import NotCompatibleError, read_chunk
from pagewick.cli.server_address import ServerAddress, error_parts

MAX_KIND_CHARS = 80
NOT_COMPATIBLE = "not a response of an OpenAI-compatible server"
_SHOWN_ERROR_BYTES = 2**16


class LoadClient:
    """Sends requests to one path of a server. timeout: seconds for a whole request."""

    def __init__(
        self, address: ServerAddress, path: str, *, timeout: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._clock = clock
        self._tls: ssl.SSLContext | None = address.tls()
        headers = {"host": address.host_header, "connection": "close", **address.headers}
        lines = [f"POST {address.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join(lines).encode("ascii")

    async def send(self, body: Mapping[str, Any]) -> RequestTiming:
        """Send a request and return its times; a failure is described in `error`."""
        payload = json.dumps(body).encode()
        reader = _ResponseReader(self._clock)
        transport = None
        try:
            async with asyncio.timeout(self._timeout):
                transport = await self._connect(reader)
                transport.write(self._head + b"\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload)
                await reader.ended
        except TimeoutError:
            reader.fail("timeout")
        except OSError as error:
            reader.fail(f"no connection ({error.strerror or type(error).__name__})")
        finally:
            if transport is not None:
                transport.abort()
        return reader.timing

    async def _connect(self, reader: _ResponseReader) -> asyncio.Transport:
        loop, address = asyncio.get_running_loop(), self._address
        if address.socket_path is not None:
            transport, _ = await loop.create_unix_connection(lambda: reader, address.socket_path)
        else:
            transport, _ = await loop.create_connection(lambda: reader, address.host, address.port, ssl=self._tls)
        return transport


class _ResponseReader(asyncio.Protocol):
    """Reads the response to one request; asyncio and httptools call its methods."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.timing = RequestTiming()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._start = clock()
        self._parser = httptools.HttpResponseParser(self)
        self._held = b""
        self._is_done = False

    def fail(self, kind: str) -> None:
        self.timing.error = self.timing.error or kind[:MAX_KIND_CHARS]
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.fail("the response ended early")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # An exception of the callbacks below: any other than this is our own mistake.
            if not isinstance(error.__context__, NotCompatibleError):
                raise
            self.fail(NOT_COMPATIBLE)
        except httptools.HttpParserError:
            self.fail(NOT_COMPATIBLE)

    def on_body(self, data: bytes) -> None:
        self._held += data
        if self._parser.get_status_code() != 200:
            self._held = self._held[:_SHOWN_ERROR_BYTES]
            return
        *lines, self._held = self._held.split(b"\n")
        now = self._clock()
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), now)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.fail(f"HTTP {status}: {error_parts(self._held)[0]}")
        elif not self._is_done:
            self.fail("the response ended early")
        self._end()

    def _read_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            self._end()
            return
        chunk = read_chunk(data)
        if chunk.error is not None:
            self.fail(f"error in the stream: {error_parts(data)[0]}")
        elif chunk.usage is not None:
            self.timing.num_prompt_tokens = chunk.usage.prompt_tokens
            self.timing.num_output_tokens = chunk.usage.completion_tokens
        if any(choice.has_text for choice in chunk.choices or ()):
            self.timing.add_piece(now - self._start)

    def _end(self) -> None:
        """End the request. Its total time is until the last text: only some servers send the usage after it."""
        if not self.ended.done():
            if self.timing.first is None:
                self.timing.total = self._clock() - self._start
            self.ended.set_result(None)
