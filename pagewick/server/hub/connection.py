"""Connection: one end of the socket pair between the hub and an API process."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from pagewick.engine.messages import encode_frame, take_frames

# Upper limit of what is read at once: messages that have gathered are handled together.
_READ_BYTES = 2**20

_Received = TypeVar("_Received")


class Connection(Generic[_Received]):
    """decode: makes a message of the body of a frame."""

    def __init__(self, reader: StreamReader, writer: StreamWriter, decode: Callable[[bytes], _Received]) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = decode
        self._received = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; nothing happens if the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def receive(self) -> list[_Received]:
        """Return all messages that have arrived, at least one; none once the other end is gone."""
        try:
            while data := await self._reader.read(_READ_BYTES):
                self._received += data
                if messages := [self._decode(body) for body in take_frames(self._received)]:
                    return messages
        except OSError:
            pass  # the connection was reset, which counts as its end
        return []

    def close(self) -> None:
        self._writer.close()
