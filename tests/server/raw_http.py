"""Bytes on a socket: a server with GuardedConnections in a thread of its own, and a client that may send anything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop
from starlette.types import ASGIApp

from pagewick.server.guard.connections import GuardedConnection
from pagewick.server.http_server import HttpServer
from pagewick.server.listening import listening
from pagewick.server.settings import ServerSettings

DEADLINE_S = 20.0


class RawServer:
    """Serves an application on a free port until `leave` is called."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, *, is_uvloop: bool = True) -> None:
        self.app = app
        self.http = HttpServer(app, settings, graceful_s=2)
        self._factory = uvloop.new_event_loop if is_uvloop else asyncio.new_event_loop
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> RawServer:
        self._thread.start()
        until(lambda: self.http.started)
        self.address: tuple[str, int] = self._listener.getsockname()
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        self._thread.join()

    def leave(self) -> None:
        """Begin to stop."""
        self._loop.call_soon_threadsafe(self.http.leave)

    def _run(self) -> None:
        with (
            listening(ServerSettings(port=0)) as self._listener,
            asyncio.Runner(loop_factory=self._factory) as runner,
        ):
            self._loop = runner.get_loop()
            runner.run(self.http.serve(sockets=[self._listener]))

    @property
    def connections(self) -> list[GuardedConnection]:
        """The connections that are open."""
        return [one for one in list(self.http.server_state.connections) if isinstance(one, GuardedConnection)]

    @property
    def num_connections(self) -> int:
        return len(self.connections)

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """Connect. receive_buffer: about how many unread bytes the client's side of the connection holds."""
        connection = socket.socket()
        connection.settimeout(DEADLINE_S)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(self.address)
        return connection

    def talk(self, *pieces: bytes) -> Answer:
        """Send the pieces, one after the other, and read until the server closes."""
        with self.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01 if len(pieces) > 1 else 0)
            return read_answer(connection)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    rest: bytes = b""  # what came after it

    @property
    def error(self) -> dict[str, Any]:
        """The error object. Checks its shape."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["message"] and error["type"] and isinstance(error["code"], str)
        assert len(self.headers["x-request-id"]) == 32
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-content-type-options"] == "nosniff"
        return error


def read_answer(connection: socket.socket) -> Answer:
    """Read one response with a content-length, and everything behind it until the server closes."""
    data = read_all(connection)
    head, separator, body = data.partition(b"\r\n\r\n")
    assert separator, data[:200]
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    length = int(headers.get("content-length", len(body)))
    assert len(body) >= length
    return Answer(int(status_line.split()[1]), headers, body[:length], body[length:])


def read_all(connection: socket.socket) -> bytes:
    data = bytearray()
    try:
        while piece := connection.recv(2**16):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
