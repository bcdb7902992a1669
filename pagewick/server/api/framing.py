"""Framing: how a dialect puts its chunks, and an error among them, into the bytes of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from pagewick.generation import Generation
from pagewick.server.errors import ApiError
from pagewick.text.output_stream import ChoiceDelta

_encoder = msgspec.json.Encoder()


class NamedEvent(NamedTuple):
    """A chunk that is sent as an event with a name, for clients that tell events apart by it."""

    name: str
    data: Any


class Following(NamedTuple):
    """Stands for the chunks of all deltas of a running Generation; more chunks may follow after its end.

    A stream makes them as the deltas come, which costs less than a generator that yields each. chunks_of: returns the
    chunks of a delta. text_chunk: called with a choice's index and a text; returns the chunk of a delta that has
    nothing but this text and is not the first of its choice. None: such chunks differ in more than their texts.
    """

    generation: Generation
    chunks_of: Callable[[ChoiceDelta], Iterable[Any]]
    text_chunk: Callable[[int, str], msgspec.Struct] | None = None


class ChunkTemplate:
    """The bytes of chunks that differ in one text only.

    chunk_of: returns the chunk with a text. frame: that of the stream's Framing.
    """

    def __init__(self, chunk_of: Callable[[str], msgspec.Struct], frame: Callable[[Any], bytes]) -> None:
        hole = "\0text\0"
        self._pieces = frame(chunk_of(hole)).split(_encoder.encode(hole))

    def framed(self, text: str) -> bytes:
        """Return what `frame` returns for the chunk with this text."""
        return _encoder.encode(text).join(self._pieces)


class Framing(Protocol):
    """end: follows the last chunk. ping: keeps a silent connection open and means nothing."""

    @property
    def media_type(self) -> str: ...
    @property
    def end(self) -> bytes: ...
    @property
    def ping(self) -> bytes: ...
    def frame(self, chunk: Any) -> bytes: ...
    def error(self, error: ApiError) -> bytes:
        """Return the last bytes that a client reads if an error follows chunks."""
        ...

    def error_body(self, error: ApiError) -> Any:
        """Return the body of a response that is nothing but an error."""
        ...


class DialectFraming(Framing, Protocol):
    """A framing that does not depend on the response."""

    def error_event(self, body: Any) -> bytes:
        """Return what `error` returns for the error with this body."""
        ...


@dataclass(frozen=True, slots=True)
class EventFraming:
    """Server-sent events.

    error_body: turns an error into the body that the dialect's clients read. error_name: name of its event, if it has
    one.
    """

    error_body: Callable[[ApiError], Any]
    error_name: str = ""
    end: bytes = b""
    media_type: str = "text/event-stream"
    ping: bytes = b": ping\n\n"

    def frame(self, chunk: Any) -> bytes:
        """Return one event. JSON has no line breaks of its own, so one line holds it."""
        if isinstance(chunk, NamedEvent):
            return b"event: " + chunk.name.encode() + b"\ndata: " + _encoder.encode(chunk.data) + b"\n\n"
        return b"data: " + _encoder.encode(chunk) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        return self.error_event(self.error_body(error))

    def error_event(self, body: Any) -> bytes:
        """Return the event with the body of an error."""
        return self.frame(NamedEvent(self.error_name, body) if self.error_name else body)


@dataclass(frozen=True, slots=True)
class LineFraming:
    """Objects in JSON, one in each line. error_body: as in EventFraming."""

    error_body: Callable[[ApiError], Any]
    end: bytes = b""
    media_type: str = "application/x-ndjson"
    # A space before the object of the line.
    ping: bytes = b" "

    def frame(self, chunk: Any) -> bytes:
        return _encoder.encode(chunk) + b"\n"

    def error(self, error: ApiError) -> bytes:
        return self.error_event(self.error_body(error))

    def error_event(self, body: Any) -> bytes:
        return self.frame(body)
