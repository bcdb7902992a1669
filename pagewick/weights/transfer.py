"""Fetch one file over HTTP: resumed where it stopped, also by a later process, and checked by its hash."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

from pagewick.errors import ModelLoadError
from pagewick.weights.progress import format_bytes

# What huggingface_hub's HTTP client raises; the client is httpx or httpx2, depending on its version.
HTTP_ERROR: Final[type[BaseException]] = HfHubHTTPError.__mro__[1]
RETRY_DELAY_SECONDS: Final = 1.0

_PARTIAL_SUFFIX: Final = ".pagewick-incomplete"
_MAX_PARALLEL_FILES: Final = 4
_MAX_FRUITLESS_ATTEMPTS: Final = 5
_TRANSIENT_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_CHUNK_BYTES: Final = 2**20


class DamagedFileError(OSError):
    """What arrived is not what the hub has."""


class TransferStoppedError(Exception):
    """Another thread's error or an interrupt ended this transfer; what has arrived is kept."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on a hub. `etag` is its SHA-256 (large files), its git blob id, or a mirror's own word."""

    name: str
    url: str
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """How files are fetched: request headers, who is told about bytes, and an event that ends everything."""

    headers: Mapping[str, str]
    advance: Callable[[int], None]
    stop: threading.Event

    def fetch(self, file: RemoteFile, destination: Path) -> None:
        """Fetch into `destination`, which appears only when it is complete and right.

        Raises HTTP_ERROR (huggingface_hub's HfHubHTTPError among it) after several attempts that brought no
        byte, DamagedFileError, another OSError from the disk, or TransferStoppedError.
        """
        path = partial_path(destination)
        with _open_without_truncating(path) as stream:
            partial = _PartialFile(stream, file)
            fruitless_attempts = 0
            while partial.size < file.size:
                size_before = partial.size
                try:
                    self._receive(file, partial)
                    reason: BaseException = DamagedFileError(f"{file.url} ends after {partial.size} bytes")
                except HTTP_ERROR as error:
                    if not _is_transient(error):
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
        _publish(path, destination)

    def _receive(self, file: RemoteFile, partial: _PartialFile) -> None:
        """One request for what is missing."""
        # "identity": positions in a compressed stream are not positions in the file.
        headers = {**self.headers, "Accept-Encoding": "identity"}
        if partial.size:
            headers["Range"] = f"bytes={partial.size}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", file.url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            if partial.size and response.status_code != 206:  # the server sends the whole file again
                self.advance(-partial.size)
                partial.restart()
            for chunk in response.iter_bytes():  # as they arrive: a larger unit would be lost with the line
                if self.stop.is_set():
                    raise TransferStoppedError
                partial.append(chunk)
                self.advance(len(chunk))


class _PartialFile:
    """The bytes that have arrived so far, and their hashes."""

    def __init__(self, stream: BinaryIO, file: RemoteFile) -> None:
        self._stream, self._file = stream, file
        self.restart(keep_file=True)
        while self.size <= file.size and (chunk := stream.read(_CHUNK_BYTES)):
            self._count(chunk)
        if self.size > file.size:
            self.restart()

    def restart(self, *, keep_file: bool = False) -> None:
        """Forget everything."""
        self.size = 0
        self._hashes = _hashes(self._file)
        self._stream.seek(0)
        if not keep_file:
            self._stream.truncate()

    def append(self, chunk: bytes) -> None:
        """Add bytes that have arrived. Raises DamagedFileError if there are more than the file has."""
        if self.size + len(chunk) > self._file.size:
            raise DamagedFileError(f"{self._file.name} arrived damaged: longer than {self._file.size} bytes")
        self._stream.write(chunk)
        self._count(chunk)

    def is_right(self) -> bool:
        """Whether size and hash are the file's; an etag that is no hash proves nothing and is accepted."""
        right_hash = not self._hashes or any(h.hexdigest() == self._file.etag for h in self._hashes)
        return self.size == self._file.size and right_hash

    def _count(self, chunk: bytes) -> None:
        self.size += len(chunk)
        for digest in self._hashes:
            digest.update(chunk)


def in_parallel(fetch: Callable[[RemoteFile], None], wanted: Iterable[RemoteFile], stop: threading.Event) -> None:
    """Call `fetch` for every file, some at a time; the first error, or Ctrl-C, sets `stop`, which ends the others."""
    with ThreadPoolExecutor(_MAX_PARALLEL_FILES) as pool:
        futures = [pool.submit(fetch, file) for file in wanted]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_disk(directory: Path, model: str, needed_bytes: int, fix: str) -> None:
    """Raises ModelLoadError, which ends with `fix`, if so many bytes do not fit where `directory` is or will be."""
    there = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if needed_bytes > free_bytes:
        raise ModelLoadError(
            f"{model} needs {format_bytes(needed_bytes)}, but only {format_bytes(free_bytes)} are "
            f"free for {directory}\n  {fix}"
        )


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def partial_path(destination: Path) -> Path:
    """Where the bytes of an unfinished file are."""
    return destination.with_name(destination.name + _PARTIAL_SUFFIX)


def _hashes(file: RemoteFile) -> list[hashlib._Hash]:
    """Hashes one of which must become the etag; none if the etag does not look like a hash."""
    if re.fullmatch(r"[0-9a-f]{64}", file.etag):
        return [hashlib.sha256()]
    if re.fullmatch(r"[0-9a-f]{40}", file.etag):  # a git blob's id; mirrors use the plain SHA-1, too
        header = b"blob %d\0" % file.size
        return [hashlib.sha1(header, usedforsecurity=False), hashlib.sha1(usedforsecurity=False)]
    return []


def _open_without_truncating(path: Path) -> BinaryIO:
    """Open for reading and writing at any position, created if missing.

    Not for appending: where a network file system ignores locks, two processes then write the same bytes to
    the same places instead of mixing them.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


def _publish(path: Path, destination: Path) -> None:
    try:
        os.replace(path, destination)
    except FileNotFoundError:
        if not destination.exists():  # else another process was faster, with the same bytes
            raise


def _is_transient(error: BaseException) -> bool:
    return not isinstance(error, HfHubHTTPError) or error.response.status_code in _TRANSIENT_STATUSES
