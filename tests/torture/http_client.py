"""An HTTP/1.1 client that may leave whenever it wants, read as slowly as it wants and send anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

# Long enough for everything that does not hang.
DEADLINE_S = 90.0


@dataclass
class Response:
    """A response, or the part of it that has arrived.

    events: the data of a stream's events. is_whole: the end has arrived, too. ended_at: on the event loop's clock.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[str] = field(default_factory=list)
    is_whole: bool = False
    ended_at: float = 0.0

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error in OpenAI's shape that the response is or that the last event of a stream holds."""
        if self.events:
            last = self.events[-1]
            return None if last == "[DONE]" else json.loads(last).get("error")
        return None if self.status == 200 else self.json()["error"]

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(one) for one in self.events if one != "[DONE]"]

    @property
    def finish_reasons(self) -> dict[int, str]:
        """The finish reason of each choice that has ended, by the choice's index."""
        parts = self.chunks if self.events else [self.json()]
        ends = [(one["index"], one["finish_reason"]) for part in parts for one in part.get("choices", ())]
        return {index: reason for index, reason in ends if reason}

    @property
    def is_terminated(self) -> bool:
        """Whether the client knows what became of its request: it has the whole response, or an error."""
        if not self.is_whole:
            return False
        return not self.events or self.events[-1] == "[DONE]" or self.error is not None


def head(method: str, path: str, address: Address, num_bytes: int | None, headers: dict[str, str]) -> bytes:
    """Return a request's line and headers; num_bytes is the length of its body."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {address[0]}:{address[1]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if num_bytes is not None:
        lines += ["content-type: application/json", f"content-length: {num_bytes}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connection:
    """One connection, for one request after another. All methods raise OSError or EOFError if the server closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address) -> None:
        self.reader, self.writer, self.address = reader, writer, address

    @classmethod
    async def open(cls, address: Address) -> Connection:
        reader, writer = await asyncio.open_connection(*address, limit=2**24)
        return cls(reader, writer, address)

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Close the connection, even in the middle of a response."""
        self.writer.close()

    async def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.writer.write(head(method, path, self.address, None if body is None else len(body), named) + (body or b""))
        await self.writer.drain()

    async def read_head(self) -> Response:
        data = await self.reader.readuntil(b"\r\n\r\n")
        status_line, *lines = data.decode("latin-1").strip().split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        return Response(int(status_line.split()[1]), {name.lower(): value.strip() for name, value in pairs})

    async def read_piece(self, response: Response) -> bool:
        """Add the next chunk, or the whole body if its length is known, to the response; return False at its end."""
        if response.headers.get("transfer-encoding") != "chunked":
            response.body += await self.reader.readexactly(int(response.headers["content-length"]))
            return self._end(response)
        size = int((await self.reader.readline()).strip() or b"x", 16)
        response.body += (await self.reader.readexactly(size + 2))[:-2]
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            *parts, rest = response.body.decode().split("\n\n")
            response.events += [part.removeprefix("data: ") for part in parts if part.startswith("data: ")]
            response.body = rest.encode()
        return bool(size) or self._end(response)

    def _end(self, response: Response) -> bool:
        response.is_whole = True
        response.ended_at = asyncio.get_running_loop().time()
        return False

    async def read(self, *, num_events: int | None = None) -> Response:
        """Read a response, or a stream up to its first `num_events` events."""
        response = await self.read_head()
        while await self.read_piece(response) and (num_events is None or len(response.events) < num_events):
            pass
        return response


async def ask(address: Address, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
    """Send one request on a connection of its own. A response that the server leaves unfinished is not whole."""
    response = Response()
    async with asyncio.timeout(DEADLINE_S), await Connection.open(address) as connection:
        with contextlib.suppress(EOFError, OSError):
            await connection.send(method, path, body, **headers)
            response = await connection.read_head()
            while await connection.read_piece(response):
                pass
        response.ended_at = asyncio.get_running_loop().time()
    return response


async def post(address: Address, path: str, fields: Any, **headers: str) -> Response:
    return await ask(address, "POST", path, json.dumps(fields).encode(), **headers)
