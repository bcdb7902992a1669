"""A name for everything that the content of a KV block depends on besides its tokens: model, formats, layout."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import pagewick
from pagewick.config import EngineConfig
from pagewick.errors import ModelLoadError
from pagewick.weights.description import is_gguf
from pagewick.weights.files import CONFIG_NAME, INDEX_NAME, needs_index, read_index, select_weights
from pagewick.weights.gguf.checkpoint import open_gguf

# Raise it whenever the same bytes of a block come to mean something else.
LAYOUT_VERSION: Final = 1

_FINGERPRINT_BYTES: Final = 16
_PAGE_BYTES: Final = 4096
_PAGES_PER_FILE: Final = 64
# https://huggingface.co/docs/safetensors: the length of the header (8 bytes, little endian), the header, the tensors.
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000


@runtime_checkable
class RotatingPart(Protocol):
    """A part of a model that determines the angles by which keys are rotated."""

    @property
    def rotation(self) -> str: ...


def model_fingerprint(directory: Path, config: EngineConfig, layout: str, rotations: Sequence[str]) -> str:
    """Return 32 hex digits that differ if blocks of one model must not be used for another.

    `config` is resolved. `layout` is the attention backend's name for the layout of a block. `rotations` are the
    model's RotatingPart.rotation, which flags can change without the files. The model's path does not count. Only
    samples of the weights are read: the headers, 64 pages per file and one page of each tensor, so an edit in place of
    a few rows can go unnoticed. Raises ModelLoadError if the files cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_FINGERPRINT_BYTES)
    try:
        for part in _parts(directory, config, layout, rotations):
            digest.update(len(part).to_bytes(8, "little"))  # so that no two lists of parts look alike
            digest.update(part)
    except OSError as error:
        raise ModelLoadError(f"cannot read the model in {directory} ({error}); check its files") from error
    return digest.hexdigest()


def _parts(directory: Path, config: EngineConfig, layout: str, rotations: Sequence[str]) -> Iterator[bytes]:
    assert config.dtype != "auto" and config.kv_cache_dtype != "auto" and config.block_size is not None
    assert config.quantization != "auto"
    yield str(LAYOUT_VERSION).encode()
    yield layout.encode()
    yield ".".join(pagewick.__version__.split(".")[:2]).encode()
    # Flags change the weights that the files become, and how they are multiplied, --batch-invariant on a GPU only.
    is_invariant = config.batch_invariant and config.device != "cpu"
    sizes = config.block_size, config.tensor_parallel_size
    flags = is_invariant, config.fp8_activations
    for value in (config.dtype, config.quantization, config.kv_cache_dtype, *sizes, *flags):
        yield str(value).encode()
    if config.speculative_method == "mtp":
        # Blocks then hold keys and values of one layer more.
        yield b"mtp"
    yield json.dumps(list(rotations)).encode()
    if is_gguf(directory):
        yield from _gguf_parts(directory, config.mmproj)
        return
    yield (directory / CONFIG_NAME).read_bytes()
    names = {entry.name for entry in directory.iterdir()}
    index = read_index(directory / INDEX_NAME) if needs_index(names) else None
    for name in select_weights(names, index, str(directory)):
        yield name.encode()
        yield from _safetensors_samples(directory / name)


def _gguf_parts(path: Path, mmproj: str | None) -> Iterator[bytes]:
    """Yield samples of each file of a GGUF checkpoint; all of its configuration is in the headers.

    mmproj: the file with the part that sees.
    """
    checkpoint = open_gguf(path, mmproj, keep_arrays=False)
    for part, file in enumerate(checkpoint.paths):
        tensors = [tensor for tensor in checkpoint.tensors if tensor.part == part]
        header_bytes = min((tensor.offset for tensor in tensors), default=0)
        ranges = [(tensor.offset, tensor.offset + tensor.num_bytes) for tensor in tensors]
        yield from _samples(file, header_bytes, ranges)


def _safetensors_samples(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > min(path.stat().st_size, _MAX_HEADER_BYTES):
            raise _damaged(path)
        header = file.read(header_bytes)
    start = _LENGTH_BYTES + header_bytes
    yield from _samples(path, start, [(start + begin, start + end) for begin, end in _tensors(header, path)])


def _samples(path: Path, header_bytes: int, tensors: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the size, the header and some pages of a file. tensors: start and end of each in the file."""
    file = os.open(path, os.O_RDONLY)
    try:
        num_bytes = os.fstat(file).st_size
        yield num_bytes.to_bytes(8, "little")
        yield os.pread(file, header_bytes, 0)
        for offset in _offsets(num_bytes, tensors):
            yield os.pread(file, _PAGE_BYTES, offset)
    finally:
        os.close(file)


def _tensors(header: bytes, path: Path) -> list[tuple[int, int]]:
    """Return start and end of every tensor, counted from the start of the data."""
    try:
        entries: dict[str, Any] = json.loads(header)
        found = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return [(int(begin), int(end)) for begin, end in found]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path) from error


def _offsets(file_bytes: int, tensors: Sequence[tuple[int, int]]) -> list[int]:
    """Return offsets of pages to read: evenly over the file, with both ends, and in the middle of every tensor."""
    last = max(0, file_bytes - _PAGE_BYTES)
    offsets = {last * index // (_PAGES_PER_FILE - 1) for index in range(_PAGES_PER_FILE)}
    for begin, end in tensors:
        offsets.add(min(max(0, begin, (begin + end - _PAGE_BYTES) // 2), last))
    return sorted(offsets)


def _damaged(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} is truncated or damaged\n  delete it, then download or copy it again")
