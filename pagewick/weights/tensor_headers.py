"""The tensors that a checkpoint holds, from the headers of its files, on this disk or on a hub. Imports no torch."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pagewick.errors import ModelLoadError, ModelNotFoundError
from pagewick.quantization.block_formats import BLOCK_FORMATS, OWN_FORMATS, kept_format
from pagewick.quantization.plan import keeps
from pagewick.weights.files import INDEX_NAME, Read, name_some, needs_index, parse_file, read_index, select_weights
from pagewick.weights.gguf.checkpoint import GgufCheckpoint
from pagewick.weights.gguf.header import FORMATS_BY_NAME
from pagewick.weights.progress import format_bytes

# The safetensors library refuses longer headers, too.
MAX_HEADER_BYTES: Final = 100_000_000

_MAX_PARALLEL_FILES: Final = 4
_MAX_DIMENSIONS: Final = 16
_MAX_ELEMENTS: Final = 2**48
_LENGTH_BYTES: Final = 8
_GIT_LFS_POINTER: Final = b"version "
_BITS: Final = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file describes it. dtype: the format's own word, such as BF16 or Q4_K. shape: outermost first.

    file_name: of the safetensors file that holds it; empty where nobody needs to know. label: the format's name for
    people, for a weight that a checkpoint stores in several tensors (weights/packed); its dtype is the one that it is
    kept in. has_column_order: its columns are sorted, so that ranks cannot share them. metadata: all texts in the
    header of its file, by name; None: there are none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file_name: str = field(default="", compare=False)
    label: str = ""
    has_column_order: bool = False
    metadata: Mapping[str, str] | None = field(default=None, compare=False, repr=False)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_in_blocks(self) -> bool:
        """Whether it is stored in a block format: one of ggml's, or one that a checkpoint's tensors are joined into."""
        block = FORMATS_BY_NAME.get(self.dtype)
        return self.dtype in OWN_FORMATS if block is None else block.num_elements > 1

    @property
    def kept_bytes(self) -> int:
        """Memory for a tensor that is in blocks, some of which are expanded at load."""
        if (block := BLOCK_FORMATS.get(kept_format(self.dtype))) is None:
            return self.num_bytes
        return self.num_elements // block[0] * block[1]

    @property
    def block_size(self) -> int:
        """Numbers of a row that ranks cannot share, for a tensor in blocks: those of a block in memory."""
        numbers, _ = BLOCK_FORMATS[kept_format(self.dtype)]
        return numbers


# The names that config.json uses for the dtypes in which models are computed.
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def with_stored_dtype(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    """Return `config`, with the dtype of most bytes of floating-point numbers if it names none, as many old files do.

    tensors: the checkpoint's, with dtypes in safetensors' words; read only if they are needed.
    """
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, Mapping) else (config,)
    if any(part.get(name) is not None for part in parts for name in ("dtype", "torch_dtype")):
        return dict(config)
    # Not the first tensor's dtype: safetensors writes wide numbers first, and a small table of frequencies in float32
    # would double the memory of a model in float16.
    num_bytes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _FLOATS:
            num_bytes[_FLOATS[tensor.dtype]] += tensor.num_bytes
    return {**config, "dtype": num_bytes.most_common(1)[0][0]} if num_bytes else dict(config)


def directory_tensors(directory: Path) -> list[TensorInfo]:
    """List the tensors of the safetensors checkpoint in a directory: file by file, by offset inside a file.

    Raises ModelNotFoundError if there is no such directory, ModelLoadError if it is incomplete or wrong.
    """
    try:
        names = {entry.name for entry in directory.iterdir()}
    except OSError as error:
        raise ModelNotFoundError(f"cannot read the model directory {directory}: {error.strerror}") from None
    index = read_index(directory / INDEX_NAME) if needs_index(names) else None
    return _checkpoint_tensors(names, lambda name: file_tensors(directory / name), index, str(directory))


def remote_tensors(
    names: Collection[str],
    size_of: Callable[[str], int],
    open_file: Callable[[str], Read],
    index: dict[str, str] | None,
    where: str,
) -> list[TensorInfo]:
    """Do what directory_tensors does, for files on a hub, given their names, their sizes and a reader for each."""

    def parse(name: str) -> list[TensorInfo]:
        return parse_safetensors_header(open_file(name), size_of(name), f"{where}/{name}")

    return _checkpoint_tensors(names, parse, index, where)


def _checkpoint_tensors(
    names: Collection[str], tensors_of: Callable[[str], list[TensorInfo]], index: dict[str, str] | None, where: str
) -> list[TensorInfo]:
    """Merge the tensors of the checkpoint's files among `names`; the index decides where there is one.

    Raises ModelLoadError if files and index contradict each other.
    """
    file_names = select_weights(names, index, where)
    found: dict[str, TensorInfo] = {}
    with ThreadPoolExecutor(_MAX_PARALLEL_FILES) as pool:
        tensors_by_file = list(pool.map(tensors_of, file_names))
    for file_name, tensors in zip(file_names, tensors_by_file, strict=True):
        for tensor in tensors:
            if index is not None and index.get(tensor.name) != file_name:
                continue
            if tensor.name in found:
                raise ModelLoadError(
                    f"{tensor.name} is in two files of {where}: {found[tensor.name].file_name} and {file_name}\n"
                    "  keep the files of one checkpoint only"
                )
            found[tensor.name] = replace(tensor, file_name=file_name)
    if missing := [f"{name} ({file_name})" for name, file_name in (index or {}).items() if name not in found]:
        raise ModelLoadError(
            f"the index of {where} lists tensors that its files do not hold: {name_some(missing)}\n"
            "  the files are of different versions; download or copy all of them again"
        )
    return list(found.values())


def file_tensors(path: Path) -> list[TensorInfo]:
    """List the tensors of one safetensors file on this disk. Raises ModelLoadError."""
    return parse_file(path, parse_safetensors_header)


def safetensors_header(shapes: Mapping[str, tuple[int, ...]], dtype: str, metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors, one after the other, all of a dtype of whole bytes."""
    return header_of(((name, dtype, shape) for name, shape in shapes.items()), metadata)


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors, one after the other: name, dtype in the format's words, shape."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + math.prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


def read_metadata(path: Path) -> Any:
    """Return the texts in a safetensors file's header. Raises OSError, or ValueError if it has none."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES).rjust(_LENGTH_BYTES, b"\xff"))
        header = json.loads(file.read(length) if length <= MAX_HEADER_BYTES else b"")
    if not isinstance(header, dict) or not isinstance(found := header.get("__metadata__"), dict):
        raise ValueError("it has no metadata")
    return found


def parse_safetensors_header(read: Read, size: int, where: str) -> list[TensorInfo]:
    """List the tensors of a safetensors file of `size` bytes, by offset; `where` names the file in messages.

    Raises ModelLoadError if the header is malformed or does not fit the file's size.
    """
    start = read(0, _LENGTH_BYTES)
    if start == _GIT_LFS_POINTER:
        raise ModelLoadError(f"{where} is a Git LFS pointer, not the weights themselves\n  fetch them: git lfs pull")
    length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else 0
    if not 0 < length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise _damaged(where, f"its header has {length} bytes, and the file {size}")
    try:
        header = json.loads(read(_LENGTH_BYTES, length))
    except (ValueError, RecursionError) as error:
        raise _damaged(where, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(where, "its header is not a JSON object")
    texts = header.pop("__metadata__", None) or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise _damaged(where, "its __metadata__ is not an object of texts")
    data_bytes = size - _LENGTH_BYTES - length
    tensors = [_tensor(name, entry, data_bytes, where, texts or None) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: header[tensor.name]["data_offsets"])
    _check_places([(one.name, *header[one.name]["data_offsets"]) for one in tensors], data_bytes, where)
    return tensors


def gguf_tensors(checkpoint: GgufCheckpoint) -> list[TensorInfo]:
    """List the tensors of a GGUF checkpoint under Hugging Face's names; those that are joined are in float32."""
    found = []
    for piece in checkpoint.pieces:
        block = FORMATS_BY_NAME[piece.stored_type]
        num_bytes = math.prod(piece.shape) // block.num_elements * block.num_bytes
        found.append(TensorInfo(piece.name, piece.stored_type, piece.shape, num_bytes))
    return found


def kept_blocks(tensors: Iterable[TensorInfo], mix: str) -> dict[str, str]:
    """Return the formats of tensors in blocks, except packed weights that are read as numbers to quantize them."""
    return {one.name: one.dtype for one in tensors if one.is_in_blocks and (not one.label or keeps(mix, one.dtype))}


def in_formats(tensors: Iterable[TensorInfo], formats: Mapping[str, str]) -> tuple[TensorInfo, ...]:
    """Return the tensors as they are once those in `formats` are quantized to these block formats."""

    def quantized(tensor: TensorInfo, kind: str) -> TensorInfo:
        numbers, num_bytes = BLOCK_FORMATS[kind]
        num_bytes = tensor.num_elements // numbers * num_bytes
        return replace(tensor, dtype=kind, num_bytes=num_bytes, has_column_order=False)

    return tuple(quantized(one, formats[one.name]) if one.name in formats else one for one in tensors)


def describe_expansions(tensors: Iterable[TensorInfo]) -> str:
    """Return which types are kept in another one, with both sizes; empty if none is."""
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.is_in_blocks and (kept := kept_format(tensor.dtype)) != tensor.dtype:
            stored, in_memory = sizes.get((tensor.dtype, kept), (0, 0))
            sizes[tensor.dtype, kept] = stored + tensor.num_bytes, in_memory + tensor.kept_bytes
    return ", ".join(
        f"{name} ({format_bytes(stored)}) to {kept} ({format_bytes(in_memory)})"
        for (name, kept), (stored, in_memory) in sizes.items()
    )


def describe_numbers(tensors: Iterable[TensorInfo]) -> str:
    """Return which packed weights are kept as numbers of 16 bits, with both sizes; empty if none is."""
    sizes: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.label and not tensor.is_in_blocks:
            stored, in_memory = sizes.get(tensor.label, (0, 0))
            sizes[tensor.label] = stored + tensor.num_bytes, in_memory + 2 * tensor.num_elements
    return ", ".join(
        f"{label} ({format_bytes(stored)}) as {format_bytes(in_memory)}" for label, (stored, in_memory) in sizes.items()
    )


def _check_places(places: Iterable[tuple[str, int, int]], data_bytes: int, where: str) -> None:
    """Refuse tensors that overlap, and bytes that belong to none, as the library does. places: name, start, stop."""
    end = 0
    for name, start, stop in places:
        if start != end:
            what = "overlaps another tensor" if start < end else "has a hole before it"
            raise _damaged(where, f"{name} lies at [{start}, {stop}], and {what}")
        end = stop
    if end != data_bytes:
        raise _damaged(where, f"its tensors end at {end}, and there are {data_bytes} bytes")


def _tensor(name: str, entry: Any, data_bytes: int, where: str, metadata: Mapping[str, str] | None) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged(where, f"{name} is not described by an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelLoadError(
            f"{where}: {name} is of the unknown data type {dtype!r}\n  known: {', '.join(_BITS)}\n"
            "  if the file is damaged, delete it, then download or copy it again"
        )
    if not _are_sizes(shape, _MAX_DIMENSIONS) or math.prod(shape) > _MAX_ELEMENTS:
        raise _damaged(where, f"{name} has the impossible shape {shape!r}"[:200])
    if not _are_sizes(offsets, 2) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise _damaged(where, f"{name} lies at {offsets!r}, and there are {data_bytes} bytes"[:200])
    num_bytes = offsets[1] - offsets[0]
    if num_bytes * 8 != math.prod(shape) * _BITS[dtype]:
        raise _damaged(where, f"{name} has {num_bytes} bytes, which does not fit {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), num_bytes, metadata=metadata)


def _are_sizes(value: Any, max_length: int) -> bool:
    """Whether this is a short list of whole numbers, 0 or more."""
    return (
        isinstance(value, list)
        and len(value) <= max_length
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 2**63 for item in value)
    )


def _damaged(where: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{where} is truncated or damaged: {reason}\n  delete it, then download or copy it again")
