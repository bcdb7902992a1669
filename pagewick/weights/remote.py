"""A model that is on a hub and is to stay there: its small files, and the first bytes of its large ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from huggingface_hub import constants, get_session
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf_header import Read
from pagewick.weights.transfer import HTTP_ERROR, DamagedFileError, RemoteFile

# Most headers are shorter; a longer one takes more requests.
_FIRST_BYTES: Final = 2**18
_MORE_BYTES: Final = 2**22
_MAX_SMALL_FILE_BYTES: Final = 256 * 2**20


class RemoteRepository:
    """The files of a model on a hub. Every method raises ModelLoadError if the hub does not answer.

    describe: a file's size and address. explain: our error for one of the HTTP client's or the system's.
    """

    def __init__(
        self,
        model: str,
        names: frozenset[str],
        describe: Callable[[str], RemoteFile],
        headers: Mapping[str, str],
        explain: Callable[[BaseException], ModelLoadError],
    ) -> None:
        self.model = model
        self.names = names
        self._describe = describe
        self._headers = headers
        self._explain = explain
        self._files: dict[str, RemoteFile] = {}

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._file(name).size

    def read_all(self, name: str) -> bytes:
        """A small file as a whole."""
        size = self.size(name)
        if size > _MAX_SMALL_FILE_BYTES:
            raise ModelLoadError(f"{name} of {self.model} has {size} bytes; it cannot be what its name says")
        return self._fetch(name, 0, size)

    def open(self, name: str) -> Read:
        """What reads from a file's beginning on, without fetching much more than is asked for."""
        size = self.size(name)
        fetched = bytearray()

        def read(offset: int, num_bytes: int) -> bytes:
            end = min(offset + num_bytes, size)
            if end > len(fetched):
                step = _MORE_BYTES if fetched else _FIRST_BYTES
                fetched.extend(self._fetch(name, len(fetched), min(size, max(end, len(fetched) + step))))
            return bytes(fetched[offset:end])

        return read

    def _file(self, name: str) -> RemoteFile:
        if name not in self._files:
            try:
                self._files[name] = self._describe(name)
            except (HTTP_ERROR, OSError) as error:
                raise self._explain(error) from error
        return self._files[name]

    def _fetch(self, name: str, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        try:
            return self._receive(self._file(name).url, start, end)
        except (HTTP_ERROR, OSError) as error:
            raise self._explain(error) from error

    def _receive(self, url: str, start: int, end: int) -> bytes:
        headers = {**self._headers, "Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        received = bytearray()
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            # A server that ignores Range sends everything: what comes before is dropped, what comes after not awaited.
            to_drop = 0 if response.status_code == 206 else start
            for chunk in response.iter_bytes():
                received.extend(chunk[to_drop:])
                to_drop = max(0, to_drop - len(chunk))
                if len(received) >= end - start:
                    break
        if len(received) < end - start:
            raise DamagedFileError(f"{url} ends after {start + len(received)} bytes")
        return bytes(received[: end - start])
