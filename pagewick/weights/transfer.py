"""Fetch one file over HTTP. A later attempt, or process, goes on where this one stopped; the hash is checked."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

# Base of all errors of huggingface_hub's HTTP client, which is httpx or httpx2, depending on its version.
HTTP_ERROR: Final[type[BaseException]] = HfHubHTTPError.__mro__[1]
RETRY_DELAY_SECONDS: Final = 1.0

_PARTIAL_SUFFIX: Final = ".pagewick-incomplete"
_MAX_FRUITLESS_ATTEMPTS: Final = 5
_TRANSIENT_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_CHUNK_BYTES: Final = 2**20


class DamagedFileError(OSError):
    """The bytes that arrived are not those that the hub listed."""


class TransferStoppedError(Exception):
    """Another thread's error or an interrupt ended this transfer; the bytes that have arrived are kept."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on a hub. etag: its SHA-256 (large files), its git blob id, or a string of a mirror's own. size: bytes."""

    name: str
    url: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Fetches files. headers: of every request. advance: called with the number of bytes that arrived.

    stop: ends all transfers when it is set.
    """

    headers: Mapping[str, str]
    advance: Callable[[int], None]
    stop: threading.Event

    def fetch(self, file: RemoteFile, destination: Path) -> None:
        """Fetch into `destination`, which appears only when it is complete and its hash is right.

        Raises HTTP_ERROR (HfHubHTTPError included) after several attempts that brought no byte, DamagedFileError,
        another OSError from the disk, or TransferStoppedError.
        """
        path = partial_path(destination)
        # Not opened for appending, because some network file systems ignore locks: two processes then write the same
        # bytes to the same places instead of mixing them.
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
            partial = _PartialFile(stream, file)
            fruitless_attempts = 0
            while partial.size < file.size:
                size_before = partial.size
                try:
                    self._receive(file, partial)
                    reason: BaseException = DamagedFileError(f"{file.url} ends after {partial.size} bytes")
                except HTTP_ERROR as error:
                    if isinstance(error, HfHubHTTPError) and error.response.status_code not in _TRANSIENT_STATUSES:
                        raise
                    reason = error
                fruitless_attempts = 0 if partial.size > size_before else fruitless_attempts + 1
                if fruitless_attempts == _MAX_FRUITLESS_ATTEMPTS:
                    raise reason
                if partial.size < file.size and self.stop.wait(RETRY_DELAY_SECONDS):
                    raise TransferStoppedError
        if not partial.is_right():
            path.unlink(missing_ok=True)
            raise DamagedFileError(f"{file.name} arrived damaged: its hash is not {file.etag}")
        try:
            os.replace(path, destination)
        except FileNotFoundError:
            if not destination.exists():  # else another process was faster, with the same bytes
                raise

    def _receive(self, file: RemoteFile, partial: _PartialFile) -> None:
        """Send one request for the bytes that are missing."""
        with open_stream(file.url, self.headers, f"{partial.size}-" if partial.size else None) as response:
            if partial.size and response.status_code != 206:  # the server sends the whole file again
                self.advance(-partial.size)
                partial.restart()
            for chunk in response.iter_bytes():  # as they arrive: a broken connection would lose a larger unit
                if self.stop.is_set():
                    raise TransferStoppedError
                partial.append(chunk)
                self.advance(len(chunk))


class _PartialFile:
    """The bytes of a file that have arrived so far, and their hashes."""

    def __init__(self, stream: BinaryIO, file: RemoteFile) -> None:
        self._stream, self._file = stream, file
        self.restart(keep_file=True)
        while self.size <= file.size and (chunk := stream.read(_CHUNK_BYTES)):
            self._count(chunk)
        if self.size > file.size:
            self.restart()

    def restart(self, *, keep_file: bool = False) -> None:
        """Begin at the first byte again; without `keep_file`, drop the bytes on the disk, too."""
        self.size = 0
        self._hashes = _hashes(self._file)
        self._stream.seek(0)
        if not keep_file:
            self._stream.truncate()

    def append(self, chunk: bytes) -> None:
        """Add bytes that have arrived. Raises DamagedFileError if the file becomes longer than the hub said."""
        if self.size + len(chunk) > self._file.size:
            raise DamagedFileError(f"{self._file.name} arrived damaged: longer than {self._file.size} bytes")
        self._stream.write(chunk)
        self._count(chunk)

    def is_right(self) -> bool:
        """Whether size and hash are those that the hub listed; an etag that is no hash is not compared."""
        right_hash = not self._hashes or any(h.hexdigest() == self._file.etag for h in self._hashes)
        return self.size == self._file.size and right_hash

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        for digest in self._hashes:
            digest.update(chunk)


@contextmanager
def open_stream(url: str, headers: Mapping[str, str], byte_range: str | None) -> Iterator[Any]:
    """Yield the HTTP client's response to a GET. byte_range: such as `5-` or `5-9`, inclusive. Raises HTTP_ERROR."""
    # "identity": positions in a compressed stream are not positions in the file.
    headers = {**headers, "Accept-Encoding": "identity"}
    if byte_range is not None:
        headers["Range"] = f"bytes={byte_range}"
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        yield response


def partial_path(destination: Path) -> Path:
    """Return where the bytes of an unfinished file are."""
    return destination.with_name(destination.name + _PARTIAL_SUFFIX)


def _hashes(file: RemoteFile) -> list[hashlib._Hash]:
    """Make the hashes, one of which must equal the etag in the end; none if the etag does not look like a hash."""
    if re.fullmatch(r"[0-9a-f]{64}", file.etag):
        return [hashlib.sha256()]
    if re.fullmatch(r"[0-9a-f]{40}", file.etag):  # a git blob's id; mirrors use the plain SHA-1, too
        header = b"blob %d\0" % file.size
        return [hashlib.sha1(header, usedforsecurity=False), hashlib.sha1(usedforsecurity=False)]
    return []
