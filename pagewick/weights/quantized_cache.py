"""QuantizedCache: files with weights that were quantized at load, in a directory of limited size. Imports no torch.

$XDG_CACHE_HOME/pagewick/quantized/<key>.safetensors    a complete file, see quantized_file.py
                                   <key>.partial        one that a process is writing, and has locked

A file is renamed when it is complete. Processes that want the same one wait for the lock, and it ends with the process
that holds it; the next one begins again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pagewick.log import get_logger
from pagewick.quantization.plan import QuantizationPlan
from pagewick.weights.dense_tensors import checkpoint_tensors
from pagewick.weights.description import directory_config, is_gguf
from pagewick.weights.gguf.checkpoint import open_gguf
from pagewick.weights.packed.config import packing_entries
from pagewick.weights.progress import format_bytes
from pagewick.weights.tensor_headers import read_metadata

logger = get_logger(__name__)

# Raise it when the quantizers or the contents of a file change.
_VERSION: Final = 1
_SUFFIX: Final = ".safetensors"
_PARTIAL_SUFFIX: Final = ".partial"
# This much of each file of a checkpoint is compared: its header, or most of it.
_HEAD_BYTES: Final = 2**20
_SHARE_OF_DISK: Final = 5


@dataclass(frozen=True, slots=True)
class QuantizedEntry:
    """One file. model: path of the checkpoint. last_used: seconds since 1970."""

    path: Path
    model: Path
    mix: str
    num_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class QuantizedCache:
    """max_bytes: of all files together; None: a fifth of what is free on the disk, counting these files as free."""

    directory: Path
    max_bytes: int | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str], max_bytes: int | None = None) -> Self:
        """Return the cache of this user."""
        home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
        return cls(Path(home, "pagewick", "quantized"), max_bytes)

    def path(self, key: str) -> Path:
        """Return the name of a complete file, which need not exist."""
        return self.directory / f"{key}{_SUFFIX}"

    def use(self, path: Path) -> None:
        """Note that a file is used now."""
        # In full resolution, so that no write has the same time.
        now = time.time_ns()
        with suppress(OSError):
            os.utime(path, ns=(now, now))

    def entries(self) -> list[QuantizedEntry]:
        """List the complete files, least recently used first."""
        found = []
        for path in _files(self.directory, _SUFFIX):
            with suppress(OSError, ValueError):
                status, about = path.stat(), read_metadata(path)
                model, mix = Path(about["model"]), about["quantization"]
                found.append(QuantizedEntry(path, model, mix, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.last_used)

    @contextmanager
    def writing(self, key: str, num_bytes: int) -> Iterator[int | None]:
        """Make room for a file, and give its descriptor; None if another process has written or tried to meanwhile.

        The file gets its name at the end of the context, unless an exception ends it. Raises OSError if there is no
        room, or nothing can be written.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self.directory / f"{key}{_PARTIAL_SUFFIX}"
        with _locked(partial) as descriptor:
            if descriptor is None or self.path(key).exists():
                yield None
                return
            try:
                self._make_room(num_bytes)
                os.ftruncate(descriptor, 0)
                yield descriptor
                partial.rename(self.path(key))
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _make_room(self, num_bytes: int) -> None:
        """Delete files that nobody finishes, then the least recently used ones."""
        for partial in _files(self.directory, _PARTIAL_SUFFIX):
            _delete_abandoned(partial)
        entries = self.entries()
        held = sum(entry.num_bytes for entry in entries)
        limit = self.max_bytes
        if limit is None:
            limit = (shutil.disk_usage(self.directory).free + held) // _SHARE_OF_DISK
        if num_bytes > limit:
            reason = (
                f"they take {format_bytes(num_bytes)}, and the limit, --quantized-cache-size, is {format_bytes(limit)}"
            )
            raise OSError(errno.ENOSPC, reason)
        for entry in entries:
            if held + num_bytes <= limit:
                return
            logger.info("deleting the weights of %s in %s: the cache of them is full", entry.model, entry.mix)
            entry.path.unlink(missing_ok=True)
            held -= entry.num_bytes


def cache_key(model: Path, plan: QuantizationPlan, mmproj: str | None = None) -> str:
    """Return a name for the weights of a checkpoint in the formats of a plan. mmproj: as in describe.

    It changes with the checkpoint's files: their paths, sizes, times and first bytes; and with the rules by which
    config.json says that they pack weights. Raises OSError.
    """
    config = {} if is_gguf(model) else directory_config(model)
    names = open_gguf(model, mmproj).paths if is_gguf(model) else _safetensors(model, config)
    hasher = hashlib.blake2b(digest_size=16)
    if rules := packing_entries(config):
        hasher.update(json.dumps(rules, sort_keys=True).encode())
    hasher.update(json.dumps([_VERSION, plan.mix, sorted(plan.formats.items())]).encode())
    for name in names:
        with name.open("rb") as file:
            status = os.fstat(file.fileno())
            hasher.update(json.dumps([str(name.resolve()), status.st_size, status.st_mtime_ns]).encode())
            hasher.update(hashlib.blake2b(file.read(_HEAD_BYTES)).digest())
    return hasher.hexdigest()


def _safetensors(directory: Path, config: Mapping[str, Any]) -> Iterable[Path]:
    names = dict.fromkeys(tensor.file_name for tensor in checkpoint_tensors(directory, config))
    return [directory / name for name in names]


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Create a file and lock it; None if another process had locked it, which has renamed or deleted it since."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is quantizing these weights; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor if _is_at(path, descriptor) else None
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _delete_abandoned(partial: Path) -> None:
    """Delete an incomplete file unless a process has locked it."""
    with suppress(OSError), partial.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink()


def _files(directory: Path, suffix: str) -> list[Path]:
    return sorted(directory.glob(f"*{suffix}")) if directory.is_dir() else []
