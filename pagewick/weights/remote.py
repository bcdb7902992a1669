"""RemoteRepository: one revision of a model on a hub, to be listed, read in pieces, or downloaded."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from huggingface_hub.errors import HfHubHTTPError

from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ModelLoadError
from pagewick.weights.files import Read
from pagewick.weights.hub_settings import HubSettings
from pagewick.weights.progress import Progress
from pagewick.weights.transfer import HTTP_ERROR, DamagedFileError, RemoteFile, open_stream

RESUMES: Final = "start again: the download goes on where it stopped"

# Most headers are shorter; a longer one takes more requests.
_FIRST_BYTES: Final = 2**18
_MORE_BYTES: Final = 2**22
_MAX_SMALL_FILE_BYTES: Final = 256 * 2**20
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class UnexpectedResponseError(Exception):
    """The hub responded, but not with the list of files. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_forbidden(error: BaseException | None) -> bool:
    """Whether an error says that this user may not write to the cache."""
    return isinstance(error, OSError) and error.errno in _FORBIDDEN


class RemoteRepository(ABC):
    """The files of one revision of a model on a hub, listed once, when it is made.

    Every method raises ModelLoadError, with the next thing to try, if the hub or the disk fails.
    names: of all files.
    """

    def __init__(self, settings: HubSettings, model: str, revision: str) -> None:
        self.settings = settings
        self.model, self.revision = model, revision
        self._files: dict[str, RemoteFile] = {}
        with self.explained():
            self.names = frozenset(self.list_names())

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """Headers of every request for a file."""

    @abstractmethod
    def list_names(self) -> Collection[str]:
        """Ask the hub for the names of all files. Raises UnexpectedResponseError, HTTP_ERROR or OSError."""

    @abstractmethod
    def describe(self, name: str) -> RemoteFile:
        """Find out a file's address, size and hash. Raises HTTP_ERROR or OSError."""

    @abstractmethod
    def explain_response(self, error: UnexpectedResponseError | HfHubHTTPError) -> ModelLoadError:
        """Return our error for an error response of the hub, or for one that it should not give."""

    @abstractmethod
    def download(self, progress: Progress | None, only: Sequence[str] = ()) -> Path:
        """Download the files that the cache lacks and return the model's directory.

        only: files to download, instead of those of the safetensors checkpoint.
        """

    def file(self, name: str) -> RemoteFile:
        """Return a file's address, size and hash."""
        if name not in self._files:
            with self.explained():
                self._files[name] = self.describe(name)
        return self._files[name]

    def size(self, name: str) -> int:
        """Return the number of bytes of a file."""
        return self.file(name).size

    def read_all(self, name: str) -> bytes:
        """Fetch a small file as a whole."""
        size = self.size(name)
        if size > _MAX_SMALL_FILE_BYTES:
            raise ModelLoadError(f"{name} of {self.model} has {size} bytes; it cannot be what its name says")
        return self.read_range(name, 0, size)

    def open(self, name: str) -> Read:
        """Return a function that reads the beginning of a file, and fetches not much more than it is asked for."""
        size = self.size(name)
        fetched = bytearray()

        def read(offset: int, num_bytes: int) -> bytes:
            end = min(offset + num_bytes, size)
            if end > len(fetched):
                step = _MORE_BYTES if fetched else _FIRST_BYTES
                fetched.extend(self.read_range(name, len(fetched), min(size, max(end, len(fetched) + step))))
            return bytes(fetched[offset:end])

        return read

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Fetch the bytes of a file from `start` up to `end`, which is excluded."""
        if start >= end:
            return b""
        url = self.file(name).url
        received = bytearray()
        with self.explained(), open_stream(url, self.headers, f"{start}-{end - 1}") as response:
            # A server that ignores Range sends the whole file: bytes before `start` are dropped.
            to_drop = 0 if response.status_code == 206 else start
            for chunk in response.iter_bytes():
                received.extend(chunk[to_drop:])
                to_drop = max(0, to_drop - len(chunk))
                if len(received) >= end - start:
                    return bytes(received[: end - start])
            raise DamagedFileError(f"{url} ends after {start + len(received)} bytes")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of the hub, its HTTP client or the disk into ModelLoadError."""
        try:
            yield
        except (HTTP_ERROR, OSError, UnexpectedResponseError) as error:
            raise self._explain(error) from error

    def _explain(self, error: BaseException) -> ModelLoadError:
        settings = self.settings
        if isinstance(error, UnexpectedResponseError | HfHubHTTPError):
            return self.explain_response(error)
        if isinstance(error, DamagedFileError):
            return ModelLoadError(f"{error}\n  start again to fetch it once more")
        if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            if error.errno in _DISK_FULL:
                room = f"free some space, or set {settings.cache_variable} to a directory on a larger disk"
                return ModelLoadError(f"the disk of {settings.cache_dir} is full\n  {room}, then {RESUMES}")
            return ModelLoadError(
                f"cannot use the cache {settings.cache_dir}: {error}\n"
                f"  set {settings.cache_variable} to a directory that you may write to"
            )
        return ModelLoadError(
            f"cannot reach {settings.endpoint}: {error or type(error).__name__}\n"
            f"  check the network, HTTPS_PROXY and {settings.endpoint_variable}, then {RESUMES}\n"
            f"  without a network: the built-in {BUILTIN_MODEL}, or a directory"
        )
