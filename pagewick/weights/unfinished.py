"""UnfinishedCheckpoint: a checkpoint of safetensors that is written part by part, and appears when it is complete.

It grows in the directory .NAME.unfinished beside its place. A part is there as a whole or not at all, so that a second
run with the same key goes on where the first one ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

# Not for this module: torch would import numpy itself, and swallow a Ctrl-C meanwhile, with half of numpy left out.
import numpy as np  # noqa: F401
import torch
from safetensors import safe_open
from torch import Tensor

from pagewick.errors import ConfigError
from pagewick.log import get_logger
from pagewick.weights.files import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, select_metadata
from pagewick.weights.mapped import release_pages
from pagewick.weights.module_files import named_files
from pagewick.weights.packed.config import SIDE_FILES
from pagewick.weights.progress import format_bytes
from pagewick.weights.safetensors import DTYPE_WORDS
from pagewick.weights.source import TensorSource
from pagewick.weights.tensor_headers import TensorInfo, file_tensors, header_of, read_metadata

_KEY_NAME: Final = "conversion.json"
_LOCK_NAME: Final = "lock"
_TEMPORARY: Final = ".part"
# A checkpoint of at most this size becomes one file.
_SINGLE_BYTES: Final = 5 * 10**9
# transformers demands to know which program's tensors these are.
_FORMAT: Final = {"format": "pt"}
_LICENSES: Final = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
_CHUNK_BYTES: Final = 2**24

_logger = get_logger(__name__)


class UnfinishedCheckpoint:
    """num_parts: of the whole. done: the indices of the parts that are complete, those of an earlier run first."""

    def __init__(self, path: Path, directory: Path, num_parts: int) -> None:
        self.path, self.directory, self.num_parts = path, directory, num_parts
        names = {entry.name for entry in directory.iterdir()}
        self.done = {index for index in range(num_parts) if self._part(index).name in names}

    def infos(self, index: int) -> Sequence[TensorInfo]:
        """Return the headers of a part that is complete."""
        return file_tensors(self._part(index))

    def texts(self, index: int) -> dict[str, str]:
        """Return the texts that `write` stored with a part."""
        return dict(read_metadata(self._part(index)))

    def reader(self, index: int) -> Callable[[str], Tensor]:
        """Return a function that reads a tensor of a part by its name, mapped."""
        file: Any = safe_open(self._part(index), framework="pt", device="cpu")

        def read(name: str) -> Tensor:
            tensor: Tensor = file.get_tensor(name)
            return tensor

        return read

    def write(self, index: int, tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None = None) -> None:
        """Write a part with these tensors. Raises ConfigError if the disk is full."""
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with self.writing():
            _write_file(self._part(index), kinds, tensors.__getitem__, {**_FORMAT, **(texts or {})})
        self.done.add(index)

    def copy(self, index: int, source: TensorSource, names: Collection[str]) -> None:
        """Write a part with these tensors of a checkpoint, one after the other. Raises ConfigError as `write` does."""
        kinds = {name: (source.dtype(name), source.shape(name)) for name in names}
        with self.writing():
            _write_file(self._part(index), kinds, source.get, _FORMAT, source.release)
        self.done.add(index)

    def finish(self, config: Mapping[str, Any], source: Path) -> int:
        """Add config.json and the source's other files, give the checkpoint its place, and return its size.

        Raises ConfigError if it cannot be written, or something has taken its place meanwhile.
        """
        with self.writing():
            infos = {index: self.infos(index) for index in range(self.num_parts)}
            sizes = [self._part(index).stat().st_size for index in infos]
            if sum(sizes) <= _SINGLE_BYTES:
                self._join(infos)
            else:
                self._write_index(infos)
            copy_side_files(source, self.directory)
            _write_json(self.directory / CONFIG_NAME, config)
            for name in (_KEY_NAME, _LOCK_NAME):
                (self.directory / name).unlink(missing_ok=True)
            _sync(self.directory)
            check_place(self.path)
            self.directory.rename(self.path)
            _sync(self.path.parent)
        return sum(entry.stat().st_size for entry in self.path.rglob("*") if entry.is_file())

    def _join(self, infos: Mapping[int, Sequence[TensorInfo]]) -> None:
        """Write one file with the tensors of all parts, and delete the parts."""
        readers = {info.name: self.reader(index) for index, found in infos.items() for info in found}
        tensors = {name: (get(name).dtype, tuple(get(name).shape)) for name, get in readers.items()}
        _write_file(self.directory / SINGLE_NAME, tensors, lambda name: readers[name](name), _FORMAT, release_pages)
        for index in infos:
            self._part(index).unlink()

    def _write_index(self, infos: Mapping[int, Sequence[TensorInfo]]) -> None:
        places = {info.name: self._part(index).name for index, found in infos.items() for info in found}
        size = sum(info.num_bytes for found in infos.values() for info in found)
        _write_json(self.directory / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": places})

    def _part(self, index: int) -> Path:
        return self.directory / f"model-{index + 1:05d}-of-{self.num_parts:05d}.safetensors"

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Within it, errors of the disk become ConfigError."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS, errno.EACCES):
                raise
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}\n"
                f"  free space and start again: {self.directory} keeps what is done, and can be deleted"
            ) from None


@contextlib.contextmanager
def unfinished_checkpoint(
    path: Path, key: Mapping[str, str], num_parts: int, num_bytes: int, *, is_resumed: bool
) -> Iterator[UnfinishedCheckpoint]:
    """Open what an earlier run has left of a checkpoint, or begin one; a run that completes no part leaves nothing.

    key: describes what the parts depend on. num_bytes: of all parts together. is_resumed: whether parts of an earlier
    run are used. Raises ConfigError if the place is taken, too small or another process's, or if the key has changed.
    """
    check_place(path)
    directory = path.with_name(f".{path.name}.unfinished")
    directory.mkdir(exist_ok=True)
    with _locked(directory, path):
        _check_key(directory, key, num_parts, is_resumed=is_resumed)
        found = UnfinishedCheckpoint(path, directory, num_parts)
        try:
            _check_space(found, num_bytes)
            yield found
        finally:
            if directory.exists() and not found.done:
                shutil.rmtree(directory)


def check_place(path: Path) -> None:
    """Raise ConfigError unless a new directory `path` can be made."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} exists already\n  give another path, or delete it")
    if not path.parent.is_dir():
        raise ConfigError(f"the directory {path.parent} does not exist\n  make it, or give another one")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} cannot be written\n  give another directory")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, template, sampling defaults, licences and modules of a model, not what describes its weights."""
    names = [entry.name for entry in source.iterdir() if entry.is_file()]
    licenses = [name for name in names if name.upper().startswith(_LICENSES)]
    modules = [name for listed in named_files(source) for name in listed if (source / name).is_file()]
    for name in [*select_metadata(names), *licenses, *modules]:
        if name != CONFIG_NAME and name not in SIDE_FILES:
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
            _sync(target / name)


def _check_key(directory: Path, key: Mapping[str, str], num_parts: int, *, is_resumed: bool) -> None:
    """Note the key in a new directory, and compare it in an old one."""
    path, key = directory / _KEY_NAME, {**key, "number of parts": str(num_parts)}
    try:
        earlier = json.loads(path.read_bytes())
    except (OSError, ValueError):
        earlier = {}
    if is_resumed and earlier and earlier != key:
        differing = [name for name in key if earlier.get(name) != key[name]]
        raise ConfigError(
            f"{directory} is an unfinished conversion with another {', '.join(differing)}\n"
            "  repeat its command to go on, or begin anew with --no-resume"
        )
    if not is_resumed or not earlier:
        for entry in directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != _LOCK_NAME:
                entry.unlink()
        _write_json(path, key)


def _check_space(found: UnfinishedCheckpoint, num_bytes: int) -> None:
    """Raise ConfigError unless the parts that are missing fit on the disk, and the one file that they become."""
    there = sum(entry.stat().st_size for entry in found.directory.iterdir())
    needed = max(0, num_bytes - there) + (num_bytes if num_bytes <= _SINGLE_BYTES else 0)
    if (free := shutil.disk_usage(found.directory).free) < needed:
        raise ConfigError(
            f"{found.path} needs {format_bytes(needed)}, and {format_bytes(free)} are free on its disk\n"
            "  free space, or give a directory on another disk"
        )


@contextlib.contextmanager
def _locked(directory: Path, path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, if there are locks. Raises ConfigError if another process holds it."""
    with (directory / _LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {path}\n  wait for it, or give another directory") from None
        except OSError as error:  # a file system without locks
            _logger.warning("%s is not locked (%s): let no other process write it", path, error.strerror)
        yield


def _keep(tensor: Tensor) -> None:
    """Leave a tensor as it is: others may still use it."""


def _write_file(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    get: Callable[[str], Tensor],
    texts: Mapping[str, str],
    release: Callable[[Tensor], None] = _keep,
) -> None:
    """Write a file of safetensors that appears when it is complete. tensors: data types and shapes."""
    unfinished = path.with_name(path.name + _TEMPORARY)
    header = header_of(((name, DTYPE_WORDS[dtype], shape) for name, (dtype, shape) in tensors.items()), texts)
    with unfinished.open("wb") as file:
        file.write(header)
        for name, (dtype, shape) in tensors.items():
            tensor = get(name)
            assert tensor.dtype == dtype and tensor.shape == shape, name
            for chunk in torch.split(tensor.contiguous().flatten().view(torch.uint8), _CHUNK_BYTES):
                file.write(chunk.numpy().data)
            release(tensor)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    _sync(path.parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
