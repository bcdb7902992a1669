"""Event streams at the ASGI level: stalled clients, slow ones, early leavers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pagewick.errors import EngineError
from pagewick.server import sse
from pagewick.server.sse import EventStream

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


def run(chunks: Chunks, receive: Any = stay, num_accepted: int = 100) -> list[Any]:
    """Send the chunks to a client that takes so many messages and then no more."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if len(sent) == num_accepted:
            await asyncio.Event().wait()
        sent.append(message)

    asyncio.run(EventStream(chunks.iterate())(SCOPE, receive, send))
    return sent


def test_events_and_the_end() -> None:
    chunks = Chunks({"a": "ü\n"}, [1])
    start, *bodies = run(chunks)
    assert start["status"] == 200 and (b"cache-control", b"no-cache") in start["headers"]
    assert [body["body"] for body in bodies] == [
        'data: {"a":"ü\\n"}\n\n'.encode(),
        b"data: [1]\n\n",
        b"data: [DONE]\n\n",
    ]
    assert [body["more_body"] for body in bodies] == [True, True, False]
    assert chunks.is_closed


def test_a_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.05)
    chunks = Chunks(*range(10))
    assert len(run(chunks, num_accepted=3)) == 3
    assert chunks.is_closed


def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    chunks = Chunks(1, 2)
    assert run(chunks, receive=leave) == []


def test_an_error_before_the_first_event_is_raised() -> None:
    with pytest.raises(EngineError):
        run(Chunks(EngineError("x")))


def test_an_error_after_it_is_an_event_and_the_end() -> None:
    *_, last = run(Chunks(1, EngineError("x")))
    assert last["body"].startswith(b'data: {"error":{"message":"x"') and not last["more_body"]
