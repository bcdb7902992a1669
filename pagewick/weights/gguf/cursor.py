"""Reads a GGUF file from its beginning, as its header has to be read. Imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.weights.files import Read

MAX_HEADER_BYTES: Final = 256 * 2**20

_CHUNK_BYTES: Final = 2**20


class MalformedError(Exception):
    """The header is malformed; the message says how."""


@dataclass(frozen=True, slots=True)
class StoredStrings:
    """An array of strings as a file has it, with the length before each: a vocabulary has hundreds of thousands."""

    stored: bytes
    length: int

    def decoded(self) -> list[str]:
        """Return the strings. A token may be any bytes, which are kept as surrogates."""
        found: list[str] = []
        stored, position, length_of = self.stored, 0, struct.Struct("<Q").unpack_from
        for _ in range(self.length):
            begin = position + 8
            position = begin + length_of(stored, position)[0]
            found.append(stored[begin:position].decode(errors="surrogateescape"))
        return found


class Values(Mapping[str, Any]):
    """The key-values of a header. An array of strings is decoded each time that it is asked for."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored

    def __getitem__(self, key: str) -> Any:
        value = self._stored[key]
        return value.decoded() if isinstance(value, StoredStrings) else value

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class Cursor:
    """Reads a file from its beginning, in large pieces, and never beyond its end or the limit for headers."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self.end = min(size, MAX_HEADER_BYTES)
        self.is_cut = size > self.end
        self.position = 0
        self._chunk = b""
        self._chunk_start = 0

    @property
    def num_left(self) -> int:
        return self.end - self.position

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes. Raises MalformedError if fewer are left."""
        self.need(num_bytes)
        first = self.position - self._chunk_start
        if not 0 <= first <= len(self._chunk) - num_bytes:
            self._chunk = self._read(self.position, min(self.num_left, max(num_bytes, _CHUNK_BYTES)))
            self._chunk_start, first = self.position, 0
            if len(self._chunk) < num_bytes:
                raise MalformedError(f"it ends within its header, after {self.position + len(self._chunk)} bytes")
        self.position += num_bytes
        return self._chunk[first : first + num_bytes]

    def skip(self, num_bytes: int) -> None:
        self.need(num_bytes)
        self.position += num_bytes

    def need(self, num_bytes: int) -> None:
        if num_bytes > self.num_left:
            if self.is_cut:
                raise MalformedError(f"its header is longer than {MAX_HEADER_BYTES} bytes")
            raise MalformedError(f"it ends within its header, at {self.end} bytes")

    def strings(self, count: int, *, is_kept: bool) -> bytes:
        """Pass over the next `count` strings; return their bytes, with the length before each, if they are kept."""
        kept: list[bytes] = []
        num_left, length_of = count, struct.Struct("<Q").unpack_from
        while num_left:
            # One that a piece of the file may cut, then all that lie in the piece where it ends.
            head = self.take(8)
            (num_bytes,) = length_of(head)
            if is_kept:
                kept += (head, self.take(num_bytes))
            else:
                self.skip(num_bytes)
            num_left -= 1
            chunk, begin = self._chunk, self.position - self._chunk_start
            position, last = begin, len(chunk) - 8
            while num_left and position <= last:
                end = position + 8 + length_of(chunk, position)[0]
                if end > len(chunk):
                    break
                position = end
                num_left -= 1
            self.position = self._chunk_start + position
            if is_kept:
                kept.append(chunk[begin:position])
        return b"".join(kept)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value
