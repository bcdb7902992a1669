"""Files with the blocks of weights that were quantized at load: safetensors whose tensors are bytes.

The last tensor holds CRC-32 checksums: of the header, then of each tensor. There is no fsync: what a power failure
damages is found by its checksum. Until the machine starts again, a file whose checksums were right is not read for them
again, unless it was changed since: an extended attribute notes the boot and the state of the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.quantization.at_load import quantize_rows
from pagewick.quantization.block_formats import BLOCK_FORMATS
from pagewick.quantization.weight import WHOLE, Pieces
from pagewick.weights.progress import Progress
from pagewick.weights.source import TensorSource
from pagewick.weights.tensor_headers import file_tensors, safetensors_header

_CHECKSUMS: Final = "checksums"
_CHECKED: Final = "user.pagewick.checked"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# Numbers that are quantized at a time.
_CHUNK_SIZE: Final = 2**23

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the tensors in a file: rows and bytes of each."""


class DamagedFileError(Exception):
    """The content of a file is not what was written."""


def stored_shapes(source: TensorSource, formats: Mapping[str, str]) -> Shapes:
    """Return the shapes of a file with these tensors of a checkpoint, each in its block format, in their order."""
    found = {}
    for name in source.names():
        if name in formats:
            numbers, num_bytes = BLOCK_FORMATS[formats[name]]
            rows, columns = source.shape(name)
            found[name] = rows, columns // numbers * num_bytes
    return found


class NewFile:
    """A file to be written. metadata: its texts."""

    def __init__(self, shapes: Shapes, metadata: Mapping[str, str]) -> None:
        self._shapes = shapes
        self._header = safetensors_header({**shapes, _CHECKSUMS: (4 * (1 + len(shapes)),)}, "U8", metadata)
        self.num_bytes = len(self._header) + sum(rows * size for rows, size in shapes.values()) + 4 * (1 + len(shapes))

    def write(
        self,
        descriptor: int,
        source: TensorSource,
        formats: Mapping[str, str],
        progress: Progress,
        pieces: Pieces = WHOLE,
    ) -> None:
        """Quantize the tensors and write them. Raises OSError, and ModelLoadError as quantize_rows does."""
        _reserve(descriptor, self.num_bytes)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(self._header)
            checksums = [zlib.crc32(self._header)]
            for name in self._shapes:
                try:
                    checksums.append(_write_tensor(file, formats[name], source, name, progress, pieces))
                except ModelLoadError as error:
                    raise ModelLoadError(f"cannot load {name}: {error}") from error
            file.write(struct.pack(f"<{len(checksums)}I", *checksums))


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Find out before the work if the disk has too little room for a file. Raises OSError then."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except AttributeError:
        pass  # not on this system
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not on this file system
            raise


def _write_tensor(
    file: BinaryIO, format: str, source: TensorSource, name: str, progress: Progress, pieces: Pieces
) -> int:
    """Write one tensor in blocks; return the checksum."""
    checksum, tensor = 0, source.get(name)
    step = max(1, _CHUNK_SIZE // tensor.shape[1], pieces.num_bytes // (tensor.shape[1] * tensor.element_size()))
    for first in range(0, len(tensor), step):
        rows = tensor[first : first + step]
        blocks = quantize_rows(format, pieces.take(rows)).cpu().numpy().data
        checksum = zlib.crc32(blocks, checksum)
        file.write(blocks)
        source.release(rows)
        progress.advance(rows.nbytes)
    return checksum


class QuantizedFile:
    """A complete file, mapped. Raises DamagedFileError unless it holds tensors of these shapes, as they were written.

    `note_checked` saves the next process the time to compute checksums.
    Raises OSError if it cannot be read.
    """

    def __init__(self, path: Path, shapes: Shapes) -> None:
        size = path.stat().st_size
        try:
            tensors = file_tensors(path)
        except ModelLoadError as error:
            raise DamagedFileError(str(error)) from error
        sizes = {**{name: tuple(shape) for name, shape in shapes.items()}, _CHECKSUMS: (4 * (1 + len(shapes)),)}
        if {tensor.name: tensor.shape for tensor in tensors} != sizes or tensors[-1].name != _CHECKSUMS:
            raise DamagedFileError("it holds other tensors")
        self._shapes = shapes
        self._offsets: dict[str, int] = {}
        offset = size - sum(tensor.num_bytes for tensor in tensors)
        for tensor in tensors:
            self._offsets[tensor.name] = offset
            offset += tensor.num_bytes
        if not _is_checked(path):
            _check_sums(path, [0, *self._offsets.values()], tensors[-1].num_bytes)
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def get(self, name: str) -> Tensor:
        """Return a tensor's rows of blocks [rows, bytes] uint8, mapped."""
        rows, row_bytes = self._shapes[name]
        offset = self._offsets[name]
        return self._bytes[offset : offset + rows * row_bytes].view(rows, row_bytes)


def note_checked(path: Path) -> None:
    """Note that a file's checksums are right. On a system that keeps no such notes, each start computes them."""
    with suppress(OSError, AttributeError):
        os.setxattr(path, _CHECKED, _state(path))


def _is_checked(path: Path) -> bool:
    with suppress(OSError, AttributeError):
        return os.getxattr(path, _CHECKED) == _state(path)
    return False


def _state(path: Path) -> bytes:
    """Return bytes that change with every boot, with every write, and for every copy."""
    status = path.stat()
    return f"{_BOOT_ID.read_text().strip()} {status.st_ino} {status.st_size} {status.st_mtime_ns}".encode()


def _check_sums(path: Path, bounds: list[int], num_bytes: int) -> None:
    """Compare the parts between neighbouring bounds with the checksums, the `num_bytes` at the end of the file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        expected = struct.unpack(f"<{num_bytes // 4}I", mapped[bounds[-1] : bounds[-1] + num_bytes])
        with memoryview(mapped) as whole, ThreadPoolExecutor(os.cpu_count()) as pool:

            def checksum(part: tuple[int, int]) -> int:
                with whole[part[0] : part[1]] as view:
                    return zlib.crc32(view)

            if tuple(pool.map(checksum, pairwise(bounds))) != expected:
                raise DamagedFileError("its checksums are wrong")
