"""Framing: how a dialect puts its chunks, and an error among them, into the bytes of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from pagewick.server.errors import ApiError

_encoder = msgspec.json.Encoder()


class NamedEvent(NamedTuple):
    """A chunk that is sent as an event with a name, for clients that tell events apart by it."""

    name: str
    data: Any


class Framing(Protocol):
    """end: what follows the last chunk. ping: what keeps a silent connection open and says nothing."""

    @property
    def media_type(self) -> str: ...
    @property
    def end(self) -> bytes: ...
    @property
    def ping(self) -> bytes: ...
    def frame(self, chunk: Any) -> bytes: ...
    def error(self, error: ApiError) -> bytes:
        """The last that a client reads, once chunks have been sent."""
        ...

    def error_body(self, error: ApiError) -> Any:
        """The body of an answer that is nothing but an error."""
        ...


@dataclass(frozen=True, slots=True)
class EventFraming:
    """Server-sent events. words: an error as the dialect's clients read it. error_name: of its event, if it has one."""

    words: Callable[[ApiError], Any]
    error_name: str = ""
    end: bytes = b""
    media_type: str = "text/event-stream"
    ping: bytes = b": ping\n\n"

    def frame(self, chunk: Any) -> bytes:
        """One event. JSON has no line breaks of its own, so one line holds it."""
        if isinstance(chunk, NamedEvent):
            return b"event: " + chunk.name.encode() + b"\ndata: " + _encoder.encode(chunk.data) + b"\n\n"
        return b"data: " + _encoder.encode(chunk) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        body = self.words(error)
        return self.frame(NamedEvent(self.error_name, body) if self.error_name else body)

    def error_body(self, error: ApiError) -> Any:
        return self.words(error)
