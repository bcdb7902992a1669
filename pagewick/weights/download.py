"""Download: bring one revision of a model from a hub into its cache, going on where an earlier attempt stopped."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Generic, TypeVar

from pagewick.errors import ModelLoadError
from pagewick.weights import files
from pagewick.weights.module_files import named_files
from pagewick.weights.progress import Progress, default_progress, format_bytes
from pagewick.weights.remote import RemoteRepository
from pagewick.weights.remote_description import remote_module_files
from pagewick.weights.transfer import RemoteFile, Transfer, partial_path

_MAX_PARALLEL_FILES: Final = 4

_Repository = TypeVar("_Repository", bound=RemoteRepository)


class Download(ABC, Generic[_Repository]):
    """The files of a repository on their way into `directory`. A subclass knows the layout of the hub's cache."""

    def __init__(self, repository: _Repository, directory: Path, only: Sequence[str] = ()) -> None:
        """only: files to fetch, instead of those of the safetensors checkpoint."""
        self._repository, self._directory, self._only = repository, directory, only
        self._stop = threading.Event()

    def run(self, progress: Progress | None) -> Path:
        """Fetch missing small files, then missing weights; return the directory. Raises ModelLoadError."""
        if not self._only:
            self._check_names()
        with self._repository.explained(), self._lock():
            if missing := self._missing(self._only or self._fetch_descriptions()):
                self._fetch_large(missing, progress or default_progress())
            self._finish()
        return self._directory

    def _check_names(self) -> None:
        """Raise ModelLoadError, before anything is fetched, if the names show that there is no checkpoint."""
        names, model = self._repository.names, self._repository.model
        if not files.needs_index(names):
            files.select_weights(names, None, model)
        files.require_config(names, model)

    def _fetch_descriptions(self) -> list[str]:
        """Fetch the small files of a checkpoint, and return the names of the others."""
        names, model = self._repository.names, self._repository.model
        has_index = files.needs_index(names)
        # Names come from a server; files.select_* pick plain ones only, so nothing is written elsewhere.
        wanted = [*files.select_metadata(names), *([files.INDEX_NAME] if has_index else [])]
        self._fetch_all(self._missing(wanted), lambda num_bytes: None)
        index = files.read_index(self._directory / files.INDEX_NAME) if has_index else None
        configs, weights = named_files(self._directory) if files.MODULES_NAME in names else ([], [])
        remote_module_files(self._repository).check([*configs, *weights])
        self._fetch_all(self._missing(configs), lambda num_bytes: None)
        return [*files.select_weights(names, index, model), *weights]

    def _lock(self) -> AbstractContextManager[object]:
        """Keep others away during the download. Default: they may work on it at the same time."""
        return nullcontext()

    @abstractmethod
    def _missing(self, names: Iterable[str]) -> list[RemoteFile]:
        """Return those of the files that are not in the directory as the hub has them."""

    @abstractmethod
    def _destination(self, file: RemoteFile) -> Path:
        """Return where the transfer puts a file."""

    @abstractmethod
    def _fetch_one(self, transfer: Transfer, file: RemoteFile) -> None:
        """Transfer a file to its destination, then make it visible in the directory."""

    @abstractmethod
    def _finish(self) -> None:
        """Record that the directory is complete."""

    def _fetch_large(self, wanted: list[RemoteFile], progress: Progress) -> None:
        total_bytes, done_bytes = sum(file.size for file in wanted), 0
        for file in wanted:
            partial = partial_path(self._destination(file))
            done_bytes += min(file.size, partial.stat().st_size) if partial.exists() else 0
        self._check_disk(total_bytes - done_bytes)
        name = "/".join((self._repository.model, *self._only[:1]))
        progress.start(f"downloading {name}", total_bytes, done_bytes)
        try:
            self._fetch_all(wanted, progress.advance)
        finally:
            progress.stop()

    def _check_disk(self, needed_bytes: int) -> None:
        settings = self._repository.settings
        directory = settings.cache_dir
        existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
        free_bytes = shutil.disk_usage(existing).free
        if needed_bytes > free_bytes:
            if not os.access(existing, os.W_OK):  # file systems that are read-only have no free space
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(existing))
            raise ModelLoadError(
                f"{self._repository.model} needs {format_bytes(needed_bytes)}, but only {format_bytes(free_bytes)} are "
                f"free for {directory}\n"
                f"  free some space, or set {settings.cache_variable} to a directory on a larger disk"
            )

    def _fetch_all(self, wanted: list[RemoteFile], advance: Callable[[int], None]) -> None:
        """Fetch files, some at a time. The first error, or Ctrl-C, ends the other transfers."""
        transfer = Transfer(self._repository.headers, advance, self._stop)
        with ThreadPoolExecutor(_MAX_PARALLEL_FILES) as pool:
            futures = [pool.submit(self._fetch_one, transfer, file) for file in wanted]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
