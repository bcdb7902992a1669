"""HTTP/1.1 connections, with a limit on everything that a client could let grow or wait.

A GuardedConnection stands between the socket and uvicorn's protocol, which gets valid requests only, one at a time. The
rest is answered with an error in OpenAI's shape, and the connection is closed. No connection has a task of its own: one
look a second goes over all of them.
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
from types import SimpleNamespace
from typing import Any

from pagewick.log import get_logger
from pagewick.server.errors import ApiError
from pagewick.server.guard.http_rules import response_bytes, too_many_connections
from pagewick.server.guard.request_reader import RequestReader
from pagewick.server.guard.unframed import unframed
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
# Upper limit of a socket option, which is an int of C.
MAX_INT = 2**31 - 1
# An extension of a request's scope: `GuardedConnection.write_chunk`.
WRITE_CHUNK = "pagewick.write_chunk"
# Key in the state of a request's scope: its GuardedConnection.
CONNECTION = "pagewick.connection"

_logger = get_logger(__name__)


class Phase(Enum):
    """The event for which a connection waits."""

    HEAD = auto()  # the headers of the first request, or of one that has begun
    RESPONSE = auto()  # the application, which has its own limits
    REST = auto()  # the rest of a body that the application did not read
    IDLE = auto()  # the next request, if there is one
    FAREWELL = auto()  # the client's end of the connection; everything has been sent


# Looked up once: an Enum member access is slow, and every event needs it.
_FAREWELL = Phase.FAREWELL


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
        self._inner = make_inner(app_state={**app_state, CONNECTION: self}, server_state=server_state, **arguments)
        self._inner_is_closed = False
        self._transport: asyncio.Transport
        self._inner_transport: Any
        self._reader = RequestReader(self, settings.max_header_size)
        self._phase = Phase.HEAD
        self._deadline = 0.0
        self._is_responding = False
        self._has_response_begun = False
        # The inner protocol has one request at a time; the others wait here.
        self._waiting: deque[bytearray] = deque()
        self._num_dropped_bytes = 0
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
        # The transport as the inner protocol sees it: it asks this connection to read on and to close.
        self._inner_transport = SimpleNamespace(
            write=transport.write,
            get_extra_info=transport.get_extra_info,
            pause_reading=transport.pause_reading,
            resume_reading=self._resume_reading,
            is_closing=self._is_closing,
            close=self._close_after_response,
        )
        self._inner.connection_made(self._inner_transport)
        num_too_many = self._watch.tally.total - self._settings.max_connections
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
        if self._is_closing():
            return
        try:
            self._reader.feed(data)
        except ApiError as error:
            self._refuse(error)
        if self._phase is Phase.IDLE and self._reader.has_partial_head:
            self._enter(Phase.HEAD, self._settings.header_timeout)

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
        elif self._phase is Phase.HEAD and self._reader.has_partial_head:
            message = f"the request's headers were not complete after {self._settings.header_timeout:g} seconds"
            self._refuse(ApiError(408, message, code="request_timeout"))
        elif not self._unsent_bytes:
            self._transport.close()

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has taken no byte for `write_timeout`, while nothing was added to the unsent bytes."""
        is_waiting = self._is_write_paused or self._is_closing()
        unsent = self._transport.get_write_buffer_size() if is_waiting else 0
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        return unsent > 0 and now - self._unsent_since >= self._settings.write_timeout

    def _enter(self, phase: Phase, timeout_s: float = float("inf")) -> None:
        self._phase = phase
        self._deadline = self._watch.time(self.loop) + timeout_s

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

    def _is_closing(self) -> bool:
        """Whether nothing more is read from the client and nothing more is written to it."""
        return self._phase is Phase.FAREWELL or self._transport.is_closing()

    def _close_after_response(self) -> None:
        """Close once everything is sent; the client may still be sending what the response did not wait for."""
        if self._phase is Phase.FAREWELL:
            return
        if self._phase is not Phase.HEAD and (self._reader.is_in_head or self._reader.is_in_body):
            self._say_farewell()
        else:
            self._transport.close()

    def _resume_reading(self) -> None:
        """Read on, unless too much waits here for its turn."""
        if sum(map(len, self._waiting)) <= MAX_WAITING_BYTES:
            self._transport.resume_reading()

    def on_response_begun(self, *, is_unframed: bool = False) -> None:
        """is_unframed: the body ends with the connection, because the client knows no other way."""
        self._has_response_begun = True
        if is_unframed:
            self._inner_transport.write = unframed(self._transport.write)

    def on_response_complete(self) -> None:
        """Hand on the next request, or wait for one."""
        self._has_response_begun = False
        if self._is_closing():
            return
        if self._waiting:
            request = self._waiting.popleft()
            self._resume_reading()
            self._inner.data_received(bytes(request))
            return
        self._is_responding = False
        self._num_dropped_bytes = 0
        if self._reader.is_in_body and any(name == b"expect" for name, _ in self._reader.headers):
            # The body may or may not come: its sender was perhaps never told to go on.
            self._say_farewell()
        elif self._reader.is_in_body:
            self._enter(Phase.REST, self._settings.body_timeout)
        elif self._reader.has_partial_head:
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

    def write_chunk(self, body: bytes) -> bool:
        """Write more of a response's body, whose length was not announced, without the turns that `send` takes.

        Returns False, and writes nothing, if the client has to read first or reads no more: `send` can wait for that.
        """
        transport = self._transport
        if self._is_write_paused or self._inner_is_closed or self._phase is _FAREWELL or transport.is_closing():
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    # Requests, from the reader

    def on_head(self, head: bytes) -> None:
        if len(self._waiting) + self._is_responding >= MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests were sent at once"
            raise ApiError(400, message, code="too_many_pipelined_requests")
        if self._is_responding:
            self._waiting.append(bytearray())
        self._is_responding = True
        self._enter(Phase.RESPONSE)
        self._hand_on(head)

    def on_body(self, data: bytes) -> None:
        if self._phase is Phase.REST:
            self._num_dropped_bytes += len(data)
            self._enter(Phase.REST, self._settings.body_timeout)
            if self._num_dropped_bytes > self._settings.body_limit(reads_images=True):
                raise ApiError(413, "the body was too large", code="request_too_large")
        self._hand_on(data)

    def on_request_end(self) -> None:
        if self._phase is Phase.REST:
            self._enter(Phase.IDLE, self._settings.keep_alive_timeout)

    # Refusals

    def _refuse(self, error: ApiError) -> None:
        """Answer bytes that are not a valid request with an error, and close the connection."""
        if self._is_closing():
            return
        _logger.debug("a connection is refused: %s", error)
        # This response can follow neither one that has begun nor one that another request still waits for. Only an
        # error in the body of the request that runs is that request's own.
        is_behind = self._waiting or (self._is_responding and not self._reader.is_in_body)
        if is_behind or self._has_response_begun or self._phase is Phase.REST:
            self._transport.abort()
            return
        self._transport.write(response_bytes(error, date_header()))
        self._say_farewell()
        self._close_inner()


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
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(timeout_s * 1000, MAX_INT)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, WRITE_BUFFER_BYTES)
