"""Event streams at the ASGI level: clients that stall, read slowly or leave early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pagewick.errors import EngineError
from pagewick.server.api import sse
from pagewick.server.api.framing import EventFraming, Framing, NamedEvent
from pagewick.server.api.openai import OPENAI_EVENTS
from pagewick.server.api.sse import EventStream
from pagewick.server.errors import ApiError
from pagewick.server.settings import ServerSettings
from tests.server.raw_http import RawServer, until

SCOPE: dict[str, Any] = {"type": "http"}


class Chunks:
    """A source of chunks that knows whether it was closed."""

    def __init__(self, *chunks: Any) -> None:
        self._chunks = chunks
        self.is_closed = False
        self.num_made = 0

    async def iterate(self) -> AsyncGenerator[Any]:
        try:
            for chunk in self._chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                self.num_made += 1
                yield chunk
        finally:
            self.is_closed = True


async def stay() -> Any:
    await asyncio.Event().wait()


async def leave() -> Any:
    return {"type": "http.disconnect"}


def run(chunks: Chunks, receive: Any = stay, *, framing: Framing = OPENAI_EVENTS, **options: Any) -> list[Any]:
    """Return all sent messages."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.sleep(0)

    asyncio.run(EventStream(chunks.iterate(), framing, keep_alive_s=10, **options)(SCOPE, receive, send))
    return sent


def test_events_and_the_end() -> None:
    chunks = Chunks({"a": "ü\n"}, [1])
    start, *bodies = run(chunks)
    assert start["status"] == 200 and (b"cache-control", b"no-cache") in start["headers"]
    sent = b"".join(body["body"] for body in bodies)
    assert sent == 'data: {"a":"ü\\n"}\n\ndata: [1]\n\ndata: [DONE]\n\n'.encode()
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert chunks.is_closed


class Lines:
    """A framing without events: one line of JSON per chunk, as in Ollama's API."""

    media_type = "application/x-ndjson"
    end = b""
    ping = b"\n"

    def frame(self, chunk: Any) -> bytes:
        return json.dumps(chunk).encode() + b"\n"

    def error(self, error: ApiError) -> bytes:
        return self.frame(self.error_body(error))

    def error_body(self, error: ApiError) -> Any:
        return {"error": error.message}


def test_a_dialect_frames_what_is_streamed() -> None:
    def sent(framing: Framing, *chunks: Any) -> tuple[str, bytes]:
        start, *bodies = run(Chunks(*chunks), framing=framing)
        return dict(start["headers"])[b"content-type"].decode(), b"".join(body["body"] for body in bodies)

    named = EventFraming(error_body=lambda error: {"type": "error", "text": error.message}, error_name="error")
    chunks = (NamedEvent("start", {"a": 1}), ["x"])
    assert sent(named, *chunks) == (
        "text/event-stream; charset=utf-8",
        b'event: start\ndata: {"a":1}\n\ndata: ["x"]\n\n',
    )
    assert sent(named, 1, EngineError("it broke"))[1] == (
        b'data: 1\n\nevent: error\ndata: {"type":"error","text":"it broke"}\n\n'
    )
    assert sent(Lines(), {"a": 1}, 2, EngineError("it broke")) == (
        "application/x-ndjson",
        b'{"a": 1}\n2\n{"error": "it broke"}\n',
    )
    # A stream of nothing is an answer, too.
    assert sent(Lines())[1] == b""


def test_a_client_that_stops_reading_is_given_up_in_the_end() -> None:
    chunks = Chunks(*(["x" * 2**16] * 1000))
    ends: list[str] = []
    stream = EventStream(chunks.iterate(), OPENAI_EVENTS, keep_alive_s=0.05, on_end=lambda: ends.append("end"))
    settings = ServerSettings(write_timeout=0.3)
    with RawServer(stream, settings) as server, server.connect(receive_buffer=4096) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        until(lambda: bool(ends))
    assert chunks.is_closed and chunks.num_made < 200


def test_a_client_that_reads_slower_than_events_are_made_gets_them_all() -> None:
    """The chunks exist at once and are many times larger than the outbox."""
    events = ["x" * (sse.OUTBOX_BYTES // 3)] * 100
    made: list[int] = []
    num_ahead: list[int] = []
    num_sent = 0

    async def chunks() -> AsyncGenerator[Any]:
        for number, text in enumerate(events):
            made.append(number)
            yield text

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_ahead.append(len(made) - num_sent)
        num_sent += message.get("body", b"").count(b"data: ")
        await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(EventStream(chunks(), OPENAI_EVENTS, keep_alive_s=10)(SCOPE, stay, send), 20))
    assert num_sent == len(events) + 1
    # Chunks that are being sent, chunks above the mark, and the one that is being made.
    assert max(num_ahead) <= 2 * 4 + 1


@pytest.mark.parametrize("num_events", [0, 3])
def test_comments_keep_a_silent_stream_alive(num_events: int) -> None:
    go_on = asyncio.Event()
    sent: list[bytes] = []

    async def chunks() -> AsyncGenerator[Any]:
        for number in range(num_events):
            yield number
        await go_on.wait()
        yield "end"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b"".join(sent).count(OPENAI_EVENTS.ping) == 2:
            go_on.set()

    asyncio.run(asyncio.wait_for(EventStream(chunks(), OPENAI_EVENTS, keep_alive_s=0.01)(SCOPE, stay, send), 20))
    events = b"".join(b"data: %d\n\n" % number for number in range(num_events))
    assert b"".join(sent).replace(OPENAI_EVENTS.ping, b"") == events + b'data: "end"\n\n' + OPENAI_EVENTS.end
    assert b"".join(sent).startswith(events + OPENAI_EVENTS.ping)


@pytest.mark.parametrize("num_cancels", [1, 2, 5])
def test_a_stream_that_is_cancelled_cleans_up_however_often(num_cancels: int) -> None:
    ends: list[str] = []

    async def chunks() -> AsyncGenerator[Any]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0.002)
            ends.append("closed")

    async def send(message: Any) -> None:
        pass

    async def main() -> None:
        stream = EventStream(chunks(), OPENAI_EVENTS, keep_alive_s=10, on_end=lambda: ends.append("end"))
        task = asyncio.create_task(stream(SCOPE, stay, send))
        for _ in range(num_cancels):
            await asyncio.sleep(0.004)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["closed", "end"]

    asyncio.run(main())


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

        await EventStream(chunks(), OPENAI_EVENTS, keep_alive_s=10)(SCOPE, stay, send)

    asyncio.run(main())
    expected = [f"data: {number}\n\n" for number in range(100)]
    assert b"".join(sent).decode() == "".join(expected) + "data: [DONE]\n\n"
    assert len(sent) < 50


def test_the_end_is_told_however_it_comes() -> None:
    ends: list[str] = []
    run(Chunks(1), on_end=lambda: ends.append("all"))
    run(Chunks(1), receive=leave, on_end=lambda: ends.append("left"))
    run(Chunks(1, EngineError("x")), on_end=lambda: ends.append("failed later"))
    with pytest.raises(EngineError):
        run(Chunks(EngineError("x")), on_end=lambda: ends.append("failed"))
    assert ends == ["all", "left", "failed later", "failed"]


def test_a_client_that_cannot_be_sent_to_ends_the_work() -> None:
    async def send(message: Any) -> None:
        raise OSError("the connection is lost")

    chunks = Chunks(1, 2)
    with pytest.raises(OSError):
        asyncio.run(EventStream(chunks.iterate(), OPENAI_EVENTS, keep_alive_s=10)(SCOPE, stay, send))
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
