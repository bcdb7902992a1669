"""Event streams at the ASGI level: stalled clients, slow ones, early leavers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pagewick.errors import EngineError
from pagewick.server.api import sse
from pagewick.server.api.sse import EventStream

SCOPE: dict[str, Any] = {"type": "http"}


class Chunks:
    """A source of chunks that knows whether it was closed."""

    def __init__(self, *chunks: Any) -> None:
        self._chunks = chunks
        self.is_closed = False

    async def iterate(self) -> AsyncGenerator[Any]:
        try:
            for chunk in self._chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.is_closed = True


async def stay() -> Any:
    await asyncio.Event().wait()


async def leave() -> Any:
    return {"type": "http.disconnect"}


def run(chunks: Chunks, receive: Any = stay, num_accepted: int = 100, **options: Any) -> list[Any]:
    """Send the chunks to a client that takes so many messages and then no more."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if len(sent) == num_accepted:
            await asyncio.Event().wait()
        sent.append(message)
        await asyncio.sleep(0)

    asyncio.run(EventStream(chunks.iterate(), **options)(SCOPE, receive, send))
    return sent


def test_events_and_the_end() -> None:
    chunks = Chunks({"a": "ü\n"}, [1])
    start, *bodies = run(chunks)
    assert start["status"] == 200 and (b"cache-control", b"no-cache") in start["headers"]
    sent = b"".join(body["body"] for body in bodies)
    assert sent == 'data: {"a":"ü\\n"}\n\ndata: [1]\n\ndata: [DONE]\n\n'.encode()
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert chunks.is_closed


def test_a_client_that_stops_reading_is_given_up() -> None:
    for num_accepted in range(3):
        chunks = Chunks(*range(10))
        assert len(run(chunks, num_accepted=num_accepted, write_timeout_s=0.05)) == num_accepted
        assert chunks.is_closed


def test_a_client_that_falls_behind_is_given_up() -> None:
    text = "x" * (sse.MAX_UNSENT_BYTES // 8)
    made = []

    async def chunks() -> AsyncGenerator[Any]:
        for number in range(1000):
            made.append(number)
            yield text
            await asyncio.sleep(0)

    async def main() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await EventStream(chunks(), write_timeout_s=60)(SCOPE, stay, send)

    asyncio.run(asyncio.wait_for(main(), 20))
    # What is being sent, what waits, and what was one too many.
    assert 8 <= len(made) <= 12


def test_a_client_that_reads_slowly_gets_everything_in_few_pieces() -> None:
    sent: list[bytes] = []

    async def chunks() -> AsyncGenerator[Any]:
        for number in range(100):
            yield number
            await asyncio.sleep(0)

    async def main() -> None:
        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            await asyncio.sleep(0.01)

        await EventStream(chunks())(SCOPE, stay, send)

    asyncio.run(main())
    expected = [f"data: {number}\n\n" for number in range(100)]
    assert b"".join(sent).decode() == "".join(expected) + "data: [DONE]\n\n"
    assert len(sent) < 50


def test_the_end_is_told_however_it_comes() -> None:
    ends: list[str] = []
    run(Chunks(1), on_end=lambda: ends.append("all"))
    run(Chunks(1), receive=leave, on_end=lambda: ends.append("left"))
    run(Chunks(1, EngineError("x")), on_end=lambda: ends.append("failed later"))
    run(Chunks(1), num_accepted=1, write_timeout_s=0.05, on_end=lambda: ends.append("stuck"))
    with pytest.raises(EngineError):
        run(Chunks(EngineError("x")), on_end=lambda: ends.append("failed"))
    assert ends == ["all", "left", "failed later", "stuck", "failed"]


def test_a_client_that_cannot_be_sent_to_ends_the_work() -> None:
    async def send(message: Any) -> None:
        raise OSError("the connection is lost")

    chunks = Chunks(1, 2)
    with pytest.raises(OSError):
        asyncio.run(EventStream(chunks.iterate())(SCOPE, stay, send))
    assert chunks.is_closed


def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    chunks = Chunks(1, 2)
    assert run(chunks, receive=leave) == []


def test_an_error_before_the_first_event_is_raised() -> None:
    with pytest.raises(EngineError):
        run(Chunks(EngineError("x")))


def test_an_error_after_it_is_an_event_and_the_end() -> None:
    _, *bodies = run(Chunks(1, EngineError("x")))
    sent = b"".join(body["body"] for body in bodies)
    assert sent.startswith(b'data: 1\n\ndata: {"error":{"message":"x"') and sent.count(b"data: ") == 2
    assert not bodies[-1]["more_body"]
