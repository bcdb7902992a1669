"""HTTP/1.1 connections: uvicorn's, with a limit on everything that a client could let grow or wait.

What a client sends is taken strictly (RFC 9112, as llhttp does without leniencies); what is no request is answered in
OpenAI's shape and the connection closed. No connection has a task or a timer: one look a second goes over all of them.

Written against uvicorn 0.30 to 0.54, whose HttpToolsProtocol and RequestResponseCycle this builds on;
tests/server/test_connections.py says which of their names.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from enum import Enum, auto
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pagewick.log import get_logger
from pagewick.server.errors import ApiError
from pagewick.server.guard.http_rules import (
    MAX_HEADERS,
    MAX_TARGET_BYTES,
    answer_bytes,
    check_head,
    check_upgrade,
    not_http,
    too_large_head,
    too_long_target,
    too_many_connections,
    too_many_headers,
)
from pagewick.server.guard.watch import Watch
from pagewick.server.settings import ServerSettings

# Requests that a client sends before it has the answer to the first.
MAX_PIPELINED = 16
# More unsent bytes than these, in this process and in the kernel each, and whoever sends waits.
WRITE_BUFFER_BYTES = 64 * 2**10
# How long what a refused client still sends is taken and dropped: at a reset it might never see the answer.
FAREWELL_S = 2.0
MAX_FAREWELLS = 256

_logger = get_logger(__name__)


class Phase(Enum):
    """What a connection waits for."""

    HEAD = auto()  # a request's headers: of the first one, or of one that has begun
    ANSWER = auto()  # us; the application has its own limits
    REST = auto()  # the rest of a body that nobody wants any more
    IDLE = auto()  # the next request, or nothing
    FAREWELL = auto()  # the client's leaving; we have said all


def make_protocol(settings: ServerSettings) -> type[GuardedProtocol]:
    """The class to give to uvicorn.Config(http=...), for one server."""
    return type("Protocol", (GuardedProtocol,), {"settings": settings, "watch": Watch(settings)})


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its class, which make_protocol makes, knows the server's settings."""

    settings: ServerSettings
    watch: Watch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ws_protocol_class = None
        self._phase = Phase.HEAD
        self._deadline = 0.0
        self._message: Phase | None = None  # of the request being read: HEAD, REST (its body), or None between two
        self._cycles: deque[RequestResponseCycle] = deque()  # without an answer, the eldest first
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_idle_bytes = 0  # that came since headers were complete or a byte of a body came
        self._num_dropped_bytes = 0
        self._is_upgrade_ignored = False
        self._refusal: ApiError | None = None
        self._unsent_bytes = 0
        self._unsent_since = 0.0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._set_socket_options(transport.get_extra_info("socket"))
        self._enter(Phase.HEAD, self.settings.header_timeout)
        self.watch.add(self)
        num_too_many = len(self.connections) - self.settings.max_connections
        if num_too_many > 0:
            self.watch.num_turned_away += 1
            self._refuse(too_many_connections(self.settings.max_connections))
        if num_too_many > MAX_FAREWELLS:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.remove(self)
        self._disconnect_cycles()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.FAREWELL or self.transport.is_closing():
            return
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD, self.settings.header_timeout)
        self._num_idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or not_http(data, error))
        if self._num_idle_bytes > self.settings.max_header_size:
            self._refuse(too_large_head(self.settings.max_header_size))

    def shutdown(self) -> None:
        if self._phase is Phase.FAREWELL:
            self.transport.abort()
        else:
            super().shutdown()

    def look(self, now: float) -> None:
        """End the connection if its client lets it wait for too long."""
        if self._is_stalled(now):
            _logger.debug("a client has read nothing for %g seconds", self.settings.write_timeout)
            self.transport.abort()
        elif now < self._deadline or self.transport.is_closing():
            return
        elif self._phase is Phase.HEAD and (self._num_idle_bytes or self._message is Phase.HEAD):
            message = f"the request's headers were not complete after {self.settings.header_timeout:g} seconds"
            self._refuse(ApiError(408, message, code="request_timeout"))
        elif not self._unsent_bytes:
            self.transport.close()

    def close_after_answer(self) -> None:
        """Close, once what is written is sent; the client may still be sending what the answer did not wait for."""
        if self._message is None:
            self.transport.close()
        else:
            self._say_farewell()

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has not taken a byte for so long. While we wait for it, nothing is added."""
        is_waiting = self.flow.write_paused or self.transport.is_closing() or self._phase is Phase.FAREWELL
        unsent = self.transport.get_write_buffer_size() if is_waiting else 0
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        return unsent > 0 and now - self._unsent_since >= self.settings.write_timeout

    def _set_socket_options(self, connection: socket.socket | None) -> None:
        if connection is None:
            return
        timeout_ms = int(self.settings.write_timeout * 1000)
        with contextlib.suppress(OSError, AttributeError):  # It is not TCP, or not Linux.
            # A peer that has vanished acknowledges nothing; a stream of few bytes would not notice for a long time.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)

    def _enter(self, phase: Phase, timeout_s: float = float("inf")) -> None:
        self._phase = phase
        self._deadline = self.loop.time() + timeout_s

    def _say_farewell(self) -> None:
        if self._phase is Phase.FAREWELL:
            return
        self._enter(Phase.FAREWELL, FAREWELL_S)
        self.pipeline.clear()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    # The parser

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # RFC 9110 lets a server ignore such an offer, and Java's client makes one with every request. Its body
                # would be taken for HTTP/2, so the parser gets the request once more, without the offer.
                self._is_upgrade_ignored = False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._message = Phase.HEAD
        self._num_headers = self._num_header_bytes = 0
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD, self.settings.header_timeout)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            self._stop(too_long_target())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        if self._num_headers > MAX_HEADERS:
            self._stop(too_many_headers())
        if self._num_header_bytes + len(self.url) > self.settings.max_header_size:
            self._stop(too_large_head(self.settings.max_header_size))
        # What comes behind a body was not there when the request was let in.
        if self._message is Phase.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_idle_bytes = 0
        try:
            if self.parser.should_upgrade():
                check_upgrade(self.parser.get_method(), self.headers)
                self._is_upgrade_ignored = True
                return
            self.url = check_head(self.url, self.parser.get_http_version(), self.headers)
        except ApiError as error:
            self._stop(error)
        if len(self._cycles) >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests were sent at once"
            self._stop(ApiError(400, message, code="too_many_pipelined_requests"))
        self._message = Phase.REST
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]
        self._cycles.append(self.cycle)
        self._enter(Phase.ANSWER)

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        if self._phase is Phase.REST:
            self._num_dropped_bytes += len(body)
            self._enter(Phase.REST, self.settings.body_timeout)
            if self._num_dropped_bytes > self.settings.max_body_size:
                self._stop(ApiError(413, "the body was too large", code="request_too_large"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade_ignored:
            return
        self._message = None
        self._num_idle_bytes = 0
        super().on_message_complete()
        if self._phase is Phase.REST:
            self._enter(Phase.IDLE, self.settings.keep_alive_timeout)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self._cycles:
            self._cycles.popleft()
        if self._cycles or self._phase is Phase.FAREWELL or self.transport.is_closing():
            return
        self._num_dropped_bytes = 0
        if self._message is Phase.REST and self.expect_100_continue:
            # Nobody knows whether the body comes now that its sender was not told to go on.
            self._say_farewell()
        elif self._message is Phase.REST:
            self._enter(Phase.REST, self.settings.body_timeout)
        elif self._message is Phase.HEAD:
            self._enter(Phase.HEAD, self.settings.header_timeout)
        else:
            self._enter(Phase.IDLE, self.settings.keep_alive_timeout)

    # Refusals

    def _stop(self, error: ApiError) -> NoReturn:
        """End the connection from below the parser, which wraps what is raised."""
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and close the connection."""
        if self.transport.is_closing() or self._phase is Phase.FAREWELL:
            return
        _logger.debug("a connection is refused: %s", error)
        # An answer that has begun, or one to another request before this, cannot be followed by this one.
        if len(self._cycles) > 1 or any(cycle.response_started for cycle in self._cycles) or self._phase is Phase.REST:
            self.transport.abort()
            return
        self._disconnect_cycles()
        self.transport.write(answer_bytes(error, STATUS_LINE[error.status], self.server_state.default_headers))
        self._say_farewell()

    def _disconnect_cycles(self) -> None:
        """Let the application know. uvicorn tells only the youngest request."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()


class _AnswerTransport:
    """The transport as an answer sees it: closing it is for the connection to do."""

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, connection: GuardedProtocol) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.close_after_answer()
