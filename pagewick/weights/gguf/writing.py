"""Writes GGUF files: the header, then the tensors' bytes one after the other. Imports no torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from pagewick.errors import ConfigError
from pagewick.weights.gguf.header import DEFAULT_ALIGNMENT, FORMATS, BlockFormat, GgufTensor, read_gguf_header
from pagewick.weights.progress import format_bytes

_NUMBERS: Final = {block.name: number for number, block in FORMATS.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_CODES: Final = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?"}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value as another file has it: the number of its type, and its bytes."""

    content: bytes


def encoded_values(path: Path) -> dict[str, Encoded]:
    """Return a file's key-values as it has them. Raises ModelLoadError."""
    spans = read_gguf_header(path, keep_arrays=False).spans
    with path.open("rb") as file:
        found = {}
        for key, (begin, end) in spans.items():
            file.seek(begin)
            found[key] = Encoded(file.read(end - begin))
    return found


def string_bytes(text: str) -> bytes:
    """Return a string as a file has it. Surrogates stand for bytes that are not UTF-8, as in StoredStrings."""
    content = text.encode(errors="surrogateescape")
    return struct.pack("<Q", len(content)) + content


def value_bytes(value: Any) -> bytes:
    """Return the number of a value's type, and the value; a whole number is unsigned, and signed in a list."""
    if isinstance(value, Encoded):
        return value.content
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + string_bytes(value)
    if isinstance(value, Sequence):
        return struct.pack("<I", _ARRAY) + _array_bytes(value)
    kind = _BOOL if isinstance(value, bool) else _UINT32 if isinstance(value, int) else _FLOAT32
    return struct.pack(f"<I{_CODES[kind]}", kind, value)


def _array_bytes(values: Sequence[Any]) -> bytes:
    first = values[0] if values else 0
    if isinstance(first, str):
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(string_bytes, values))
    kind = _BOOL if isinstance(first, bool) else _INT32 if isinstance(first, int) else _FLOAT32
    return struct.pack(f"<IQ{len(values)}{_CODES[kind]}", kind, len(values), *values)


def place_tensors(shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, BlockFormat]) -> tuple[GgufTensor, ...]:
    """Return the tensors in this order. Offsets are relative to the first one, and aligned."""
    found, offset = [], 0
    for name, shape in shapes.items():
        block = formats[name]
        num_bytes = prod(shape) // block.num_elements * block.num_bytes
        found.append(GgufTensor(name, shape, block, offset, num_bytes))
        offset = _aligned(offset + num_bytes)
    return tuple(found)


def header_bytes(values: Mapping[str, Any], tensors: Sequence[GgufTensor]) -> bytes:
    """Return the header of a file with these key-values and tensors (from place_tensors), padded to its alignment."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    for key, value in values.items():
        parts += [string_bytes(key), value_bytes(value)]
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        place = struct.pack("<IQ", _NUMBERS[tensor.format.name], tensor.offset)
        parts += [string_bytes(tensor.name), sizes, place]
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def padding(tensor: GgufTensor) -> bytes:
    """Return the bytes between a tensor and the next one."""
    return bytes(_aligned(tensor.num_bytes) - tensor.num_bytes)


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


@contextlib.contextmanager
def new_file(path: Path, num_bytes: int, *, is_forced: bool) -> Iterator[BinaryIO]:
    """Open a file of num_bytes that appears at `path` when it is complete and on the disk; nothing is left otherwise.

    is_forced: whether it replaces a file that is there. Raises ConfigError if it exists, or cannot be written.
    """
    check_place(path, num_bytes, is_forced=is_forced)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_place(path, 0, is_forced=is_forced)
        os.replace(unfinished, path)
        _sync_directory(path.parent)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        raise ConfigError(f"cannot write {path}: {error.strerror}\n  free space, or choose another place") from None
    finally:
        unfinished.unlink(missing_ok=True)


def check_place(path: Path, num_bytes: int, *, is_forced: bool) -> None:
    """Raise ConfigError unless num_bytes can be written to a new file `path`."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory\n  give the name of a file in it: {path / 'model.gguf'}")
    if path.exists() and not is_forced:
        raise ConfigError(f"{path} exists already\n  choose another place, or replace it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"the directory {path.parent} does not exist\n  make it, or choose another place")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} cannot be written\n  make it writable, or choose another place")
    if (free := shutil.disk_usage(path.parent).free) < num_bytes:
        raise ConfigError(
            f"{path} needs {format_bytes(num_bytes)}, and {format_bytes(free)} are free on its disk\n"
            "  free space, or choose another place"
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
