"""HTTP/1.1 connections, with a limit on everything that a client could let grow or wait.

A GuardedConnection stands between the socket and uvicorn's protocol. It parses what the client sends, strictly (RFC
9112, as llhttp does without leniencies), and hands on valid requests, one at a time and written anew: without trailers,
offers of other protocols and absolute targets. Anything else is answered with an error in OpenAI's shape, and the
connection is closed. No connection has a task of its own: one look a second goes over all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NoReturn

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.log import get_logger
from pagewick.server.errors import ApiError
from pagewick.server.guard.http_rules import (
    MAX_HEADERS,
    MAX_TARGET_BYTES,
    check_head,
    check_upgrade,
    not_http,
    response_bytes,
    too_large_head,
    too_long_target,
    too_many_connections,
    too_many_headers,
)
from pagewick.server.guard.watch import Watch
from pagewick.server.settings import ServerSettings

# Upper limit of requests that a client sends before it has the response to the first.
MAX_PIPELINED = 16
# With more bytes of these requests, reading stops. While less waits, a client that leaves is noticed at once.
MAX_WAITING_BYTES = 64 * 2**10
# With more unsent bytes than this, in this process and in the kernel each, the application waits before it sends more.
WRITE_BUFFER_BYTES = 64 * 2**10
# Seconds for which input of a refused client is read and dropped. A reset could reach it before the response does.
FAREWELL_S = 2.0
MAX_FAREWELLS = 256
# Where the state of a request's scope holds its GuardedConnection.
_CONNECTION = "pagewick.connection"

_logger = get_logger(__name__)


class Phase(Enum):
    """What a connection waits for."""

    HEAD = auto()  # the headers of the first request, or of one that has begun
    RESPONSE = auto()  # the application, which has its own limits
    REST = auto()  # the rest of a body that the application did not read
    IDLE = auto()  # the next request, if there is one
    FAREWELL = auto()  # the client's end of the connection; everything has been sent


class GuardedConnection(asyncio.Protocol):
    """One connection. make_inner: uvicorn's protocol class, called with the arguments that uvicorn gives."""

    def __init__(
        self,
        make_inner: Callable[..., asyncio.Protocol],
        settings: ServerSettings,
        watch: Watch,
        *,
        app_state: dict[str, Any],
        server_state: Any,
        **arguments: Any,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._settings = settings
        self._watch = watch
        self._open_connections: set[Any] = server_state.connections
        self._inner = make_inner(app_state={**app_state, _CONNECTION: self}, server_state=server_state, **arguments)
        self._inner_is_closed = False
        self._transport: asyncio.Transport
        self._parser = _new_parser(self)
        self._phase = Phase.HEAD
        self._deadline = 0.0
        self._refusal: ApiError | None = None

        # The message that is being parsed.
        self._message: Phase | None = None  # HEAD, REST (its body), or None between two
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_idle_bytes = 0  # since headers were complete, or since the last byte of a body
        self._num_dropped_bytes = 0
        self._is_chunked = False
        self._is_upgrade_ignored = False

        # Responses: the inner protocol has one request at a time, the others wait here.
        self._is_responding = False
        self._has_response_begun = False
        self._waiting: deque[bytearray] = deque()
        self._is_write_paused = False
        self._unsent_bytes = 0
        self._unsent_since = 0.0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        set_socket_options(transport.get_extra_info("socket"), self._settings.write_timeout)
        self._enter(Phase.HEAD, self._settings.header_timeout)
        self._watch.add(self)
        self._open_connections.add(self)  # uvicorn calls `shutdown` of each when it stops
        self._inner.connection_made(_InnerTransport(self, transport))
        num_too_many = len(self._watch) - self._settings.max_connections
        if num_too_many > 0:
            self._watch.num_turned_away += 1
            self._refuse(too_many_connections(self._settings.max_connections))
        if num_too_many > MAX_FAREWELLS:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.remove(self)
        self._open_connections.discard(self)
        self._close_inner()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.is_closing():
            return
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD, self._settings.header_timeout)
        self._num_idle_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or not_http(data, error))
        if self._num_idle_bytes > self._settings.max_header_size:
            self._refuse(too_large_head(self._settings.max_header_size))

    def shutdown(self) -> None:
        """End the farewell. In any other phase the inner protocol, which uvicorn asks too, closes the connection."""
        if self._phase is Phase.FAREWELL:
            self._transport.abort()

    def look(self, now: float) -> None:
        """End the connection if its client takes too long."""
        if self._is_stalled(now):
            _logger.debug("a client has read nothing for %g seconds", self._settings.write_timeout)
            self._transport.abort()
        elif now < self._deadline or self._transport.is_closing():
            return
        elif self._phase is Phase.HEAD and (self._num_idle_bytes or self._message is Phase.HEAD):
            message = f"the request's headers were not complete after {self._settings.header_timeout:g} seconds"
            self._refuse(ApiError(408, message, code="request_timeout"))
        elif not self._unsent_bytes:
            self._transport.close()

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has taken no byte for `write_timeout` while nothing is added to what it should read."""
        is_waiting = self._is_write_paused or self.is_closing()
        unsent = self._transport.get_write_buffer_size() if is_waiting else 0
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        return unsent > 0 and now - self._unsent_since >= self._settings.write_timeout

    def _enter(self, phase: Phase, timeout_s: float = float("inf")) -> None:
        self._phase = phase
        self._deadline = self.loop.time() + timeout_s

    def _say_farewell(self) -> None:
        """Send what is written and the end of the stream; then drop what the client sends until it closes, too."""
        if self._phase is Phase.FAREWELL:
            return
        self._enter(Phase.FAREWELL, FAREWELL_S)
        self._waiting.clear()
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    # The inner protocol's side

    def is_closing(self) -> bool:
        """Whether nothing more is read from the client and nothing more is written to it."""
        return self._phase is Phase.FAREWELL or self._transport.is_closing()

    def close_after_response(self) -> None:
        """Close once everything is sent; the client may still be sending what the response did not wait for."""
        if self._phase is Phase.FAREWELL:
            return
        if self._message is None or self._phase is Phase.HEAD:
            self._transport.close()
        else:
            self._say_farewell()

    def resume_reading(self) -> None:
        """Read on, unless too much waits here for its turn."""
        if sum(map(len, self._waiting)) <= MAX_WAITING_BYTES:
            self._transport.resume_reading()

    def on_response_begun(self) -> None:
        self._has_response_begun = True

    def on_response_complete(self) -> None:
        """Hand on the next request, or wait for one."""
        self._has_response_begun = False
        if self.is_closing():
            return
        if self._waiting:
            request = self._waiting.popleft()
            self.resume_reading()
            self._inner.data_received(bytes(request))
            return
        self._is_responding = False
        self._num_dropped_bytes = 0
        if self._message is Phase.REST and any(name == b"expect" for name, _ in self._headers):
            # The body may or may not come: its sender was perhaps never told to go on.
            self._say_farewell()
        elif self._message is Phase.REST:
            self._enter(Phase.REST, self._settings.body_timeout)
        elif self._message is Phase.HEAD:
            self._enter(Phase.HEAD, self._settings.header_timeout)
        else:
            self._enter(Phase.IDLE, self._settings.keep_alive_timeout)

    def _hand_on(self, data: bytes) -> None:
        """Give the inner protocol more of the latest request, or keep it until its turn."""
        if self._waiting:
            self._waiting[-1] += data
            if sum(map(len, self._waiting)) > MAX_WAITING_BYTES:
                self._transport.pause_reading()
        else:
            self._inner.data_received(data)

    def _close_inner(self) -> None:
        """Let the application know that the client is gone."""
        if not self._inner_is_closed:
            self._inner_is_closed = True
            self._inner.connection_lost(None)

    # The parser

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # RFC 9110 lets a server ignore such an offer, and Java's client makes one with every request. llhttp
                # would take the body for HTTP/2, so a new parser gets the request once more, without the offer.
                self._is_upgrade_ignored = False
                data = self._head(self._target) + data[upgrade.args[0] :]
                self._parser = _new_parser(self)

    def _head(self, target: bytes) -> bytes:
        """Return the request line and headers, without an offer of another protocol."""
        version = self._parser.get_http_version().encode("ascii")
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), target, version)]
        lines += [b"%s: %s" % pair for pair in self._headers if pair[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        self._message = Phase.HEAD
        self._target, self._headers = b"", []
        self._num_headers = self._num_header_bytes = 0
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD, self._settings.header_timeout)

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > MAX_TARGET_BYTES:
            self._stop(too_long_target())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        if self._num_headers > MAX_HEADERS:
            self._stop(too_many_headers())
        if self._num_header_bytes + len(self._target) > self._settings.max_header_size:
            self._stop(too_large_head(self._settings.max_header_size))
        # Trailers behind a body are dropped: they were not there when the request was let in.
        if self._message is Phase.HEAD:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._num_idle_bytes = 0
        try:
            if self._parser.should_upgrade():
                check_upgrade(self._parser.get_method(), self._headers)
                self._is_upgrade_ignored = True
                return
            target = check_head(self._target, self._parser.get_http_version(), self._headers)
        except ApiError as error:
            self._stop(error)
        if len(self._waiting) + self._is_responding >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests were sent at once"
            self._stop(ApiError(400, message, code="too_many_pipelined_requests"))
        self._message = Phase.REST
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self._headers)
        if self._is_responding:
            self._waiting.append(bytearray())
        self._is_responding = True
        self._enter(Phase.RESPONSE)
        self._hand_on(self._head(target))

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        if self._phase is Phase.REST:
            self._num_dropped_bytes += len(body)
            self._enter(Phase.REST, self._settings.body_timeout)
            if self._num_dropped_bytes > self._settings.max_body_size:
                self._stop(ApiError(413, "the body was too large", code="request_too_large"))
        self._hand_on(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)

    def on_message_complete(self) -> None:
        if self._is_upgrade_ignored:
            return
        self._message = None
        self._num_idle_bytes = 0
        if self._is_chunked:
            self._hand_on(b"0\r\n\r\n")
        if self._phase is Phase.REST:
            self._enter(Phase.IDLE, self._settings.keep_alive_timeout)

    # Refusals

    def _stop(self, error: ApiError) -> NoReturn:
        """End the connection from below the parser, which wraps what is raised."""
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Answer what is not a request, and close the connection."""
        if self.is_closing():
            return
        _logger.debug("a connection is refused: %s", error)
        # This response can follow neither one that has begun nor one that another request still waits for.
        if self._waiting or self._has_response_begun or self._phase is Phase.REST:
            self._transport.abort()
            return
        self._transport.write(response_bytes(error, date_header()))
        self._say_farewell()
        self._close_inner()


class _InnerTransport(asyncio.Transport):
    """The transport as the inner protocol sees it: it writes to the socket, and asks the connection to close."""

    def __init__(self, connection: GuardedConnection, transport: asyncio.Transport) -> None:
        super().__init__()
        self._connection = connection
        self._transport = transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._connection.resume_reading()

    def is_closing(self) -> bool:
        return self._connection.is_closing()

    def close(self) -> None:
        self._connection.close_after_response()


class ResponseEvents:
    """Around the application: tells each GuardedConnection where responses begin and end, and dates them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedConnection = scope["state"][_CONNECTION]
        is_complete = False

        async def observe(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                connection.on_response_begun()
                message = {**message, "headers": [date_header(), *message.get("headers", ())]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True
                connection.on_response_complete()

        try:
            await self._app(scope, receive, observe)
        finally:
            if not is_complete:
                connection.on_response_complete()


def date_header() -> tuple[bytes, bytes]:
    return b"date", _http_date(int(time.time()))


@lru_cache(maxsize=1)
def _http_date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def set_socket_options(connection: socket.socket | None, timeout_s: float) -> None:
    """Let the kernel end connections whose peer has vanished, which a stream of few bytes would not notice for long."""
    if connection is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # It is not TCP, or not Linux.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)


def _new_parser(connection: GuardedConnection) -> Any:
    parser = httptools.HttpRequestParser(connection)
    # A client may send more after its last request; that is never looked at.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
