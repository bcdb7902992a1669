"""The header of a GGUF file: its key-values and the places of its tensors. Reads no weights, imports no torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. A header comes from
strangers: every count and length is compared with the rest of the file before memory is allocated for it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagewick.errors import ModelLoadError
from pagewick.weights.files import Read, parse_file
from pagewick.weights.gguf.cursor import Cursor, MalformedError, StoredStrings, Values

DEFAULT_ALIGNMENT: Final = 32
MAX_TENSORS: Final = 2**17
MAX_KEYS: Final = 2**16
MAX_KEY_BYTES: Final = 2**16
MAX_DIMENSIONS: Final = 4
MAX_ELEMENTS: Final = 2**48

_MAGIC: Final = b"GGUF"
# The formats before GGUF: ggml, ggmf, ggjt, and ggla for adapters, each as a little-endian number.
_LEGACY_MAGICS: Final = (b"lmgg", b"fmgg", b"tjgg", b"algg")
# Longer arrays are vocabularies.
_MAX_SMALL_ARRAY: Final = 4096
_MAX_PROBLEM_CHARS: Final = 500
_VERSIONS: Final = (2, 3)
_MIN_KEY_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class BlockFormat(NamedTuple):
    """How ggml stores numbers: `num_bytes` for every `num_elements` of a row."""

    name: str
    num_elements: int
    num_bytes: int


# By ggml_type, the number in the file; sizes as in ggml-common.h. Missing numbers are not used any more, or never were.
FORMATS: Final[Mapping[int, BlockFormat]] = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    9: BlockFormat("Q8_1", 32, 36),
    10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    15: BlockFormat("Q8_K", 256, 292),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: BlockFormat("IQ4_NL", 32, 18),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: BlockFormat("IQ4_XS", 256, 136),
    24: BlockFormat("I8", 1, 1),
    25: BlockFormat("I16", 1, 2),
    26: BlockFormat("I32", 1, 4),
    27: BlockFormat("I64", 1, 8),
    28: BlockFormat("F64", 1, 8),
    29: BlockFormat("IQ1_M", 256, 56),
    30: BlockFormat("BF16", 1, 2),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17),
    40: BlockFormat("NVFP4", 64, 36),
    41: BlockFormat("Q1_0", 128, 18),
    42: BlockFormat("Q2_0", 64, 18),
}


FORMATS_BY_NAME: Final[Mapping[str, BlockFormat]] = {block.name: block for block in FORMATS.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: outermost dimension first, as in torch (the file stores it in reverse order).

    offset: position of its first byte in the file. part: number of the file among those of a split model, from 0.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    num_bytes: int
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the innermost dimension."""
        return self.shape[-1] // self.format.num_elements * self.format.num_bytes


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that was skipped: the type and number of its elements."""

    type: int
    length: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A file's header. values: the key-values; arrays are lists, or GgufArray if long ones were not asked for.

    spans: where in the file the type and the value of each key begin and end.
    """

    version: int
    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    spans: Mapping[str, tuple[int, int]]


def read_gguf_header(path: Path, *, keep_arrays: bool = True) -> GgufHeader:
    """Read the header of a file on this disk.

    The last ones stay in memory: a start needs the same headers in several places, and a large vocabulary takes 0.1 s.
    Raises ModelLoadError if the file cannot be read, is no GGUF, contradicts itself, or is shorter than its tensors.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}\n  check the file") from error
    return _read_once(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns), keep_arrays)


@lru_cache(maxsize=64)  # the parts of a split model, too
def _read_once(path: Path, state: tuple[int, ...], keep_arrays: bool) -> GgufHeader:
    """Read a header. state: tells a file from one that has replaced it."""

    def parse(read: Read, size: int, where: str) -> GgufHeader:
        header = parse_gguf_header(read, size, where, keep_arrays=keep_arrays)
        end = max((tensor.offset + tensor.num_bytes for tensor in header.tensors), default=0)
        if end > size:
            raise ModelLoadError(
                f"{where} is truncated: it has {size} bytes, and its tensors need {end}\n  download or copy it again"
            )
        return header

    return parse_file(path, parse)


def parse_gguf_header(read: Read, size: int, where: str, *, keep_arrays: bool = True) -> GgufHeader:
    """Read the header of a file of `size` bytes; `where` names the file in messages. Raises ModelLoadError."""
    try:
        return _Parser(Cursor(read, size), keep_arrays).parse()
    except _LegacyError:
        raise ModelLoadError(
            f"{where} is a GGML file, a format older than GGUF that is not supported\n"
            "  convert it with llama.cpp's convert_llama_ggml_to_gguf.py, or use a GGUF file of the model"
        ) from None
    except MalformedError as error:
        # Names in a damaged file may be anything.
        problem = "".join(char if char.isprintable() else "?" for char in str(error)[:_MAX_PROBLEM_CHARS])
        raise ModelLoadError(f"{where} is not a usable GGUF file: {problem}\n  download or copy it again") from error


class _LegacyError(Exception):
    """The file has one of the formats that were used before GGUF."""


class _Parser:
    def __init__(self, cursor: Cursor, keep_arrays: bool) -> None:
        self._cursor = cursor
        self._keep_arrays = keep_arrays

    def parse(self) -> GgufHeader:
        cursor = self._cursor
        magic = cursor.take(4) if cursor.num_left >= 4 else b""
        if magic in _LEGACY_MAGICS:
            raise _LegacyError
        if magic != _MAGIC:
            raise MalformedError("it does not begin with GGUF")
        version = cursor.number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in _VERSIONS else f"version {version}"
            raise MalformedError(f"it is {kind}; versions 2 and 3, little-endian, can be read")
        num_tensors = self._count("tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
        num_keys = self._count("keys", MAX_KEYS, _MIN_KEY_BYTES)
        values: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            key = self._name("key")
            if key in values:
                raise MalformedError(f"the key {key!r} is there twice")
            begin = cursor.position
            values[key] = self._value(cursor.number("I"), key)
            spans[key] = (begin, cursor.position)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
            raise MalformedError(f"general.alignment is {alignment!r}, and must be a power of two")
        return GgufHeader(version, Values(values), self._place(infos, alignment), spans)

    def _count(self, what: str, limit: int, min_bytes: int) -> int:
        count: int = self._cursor.number("Q")
        if count > limit:
            raise MalformedError(f"it claims to have {count} {what}, more than the {limit} that are read")
        self._cursor.need(count * min_bytes)
        return count

    def _name(self, what: str) -> str:
        length = self._cursor.number("Q")
        if not 0 < length <= MAX_KEY_BYTES:
            raise MalformedError(f"the name of a {what} has {length} bytes")
        return self._text(length, what)

    def _text(self, length: int, what: str) -> str:
        try:
            return self._cursor.take(length).decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"{what} is not UTF-8") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(self._cursor.number("Q"), key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise MalformedError(f"{key} has the unknown type {kind}")
        value = self._cursor.number(_SCALARS[kind])
        if kind == _BOOL:
            if value > 1:
                raise MalformedError(f"{key} is {value}, and must be true or false")
            return bool(value)
        return value

    def _array(self, key: str) -> list[Any] | StoredStrings | GgufArray:
        kind, length = self._cursor.number("I"), self._cursor.number("Q")
        if kind == _STRING:
            self._cursor.need(8 * length)
            stored = self._cursor.strings(length, is_kept=self._keep_arrays)
            return StoredStrings(stored, length) if self._keep_arrays else GgufArray(kind, length)
        if kind not in _SCALARS:
            what = "an array of arrays" if kind == _ARRAY else f"an array of the unknown type {kind}"
            raise MalformedError(f"{key} is {what}")
        code = _SCALARS[kind]
        num_bytes = length * struct.calcsize("<" + code)
        self._cursor.need(num_bytes)
        if not self._keep_arrays and length > _MAX_SMALL_ARRAY:
            self._cursor.skip(num_bytes)
            return GgufArray(kind, length)
        numbers = struct.unpack(f"<{length}{code}", self._cursor.take(num_bytes))
        return [bool(number) for number in numbers] if kind == _BOOL else list(numbers)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        """Return name, shape, format, and offset relative to the beginning of the tensors."""
        name = self._name("tensor")
        num_dimensions = self._cursor.number("I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise MalformedError(f"{name} has {num_dimensions} dimensions")
        sizes = [self._cursor.number("Q") for _ in range(num_dimensions)]
        # Each size is compared before they are multiplied, because a stranger chose them.
        if not all(0 < size <= MAX_ELEMENTS for size in sizes) or math.prod(sizes) > MAX_ELEMENTS:
            raise MalformedError(f"{name} has the impossible shape {sizes}")
        kind = self._cursor.number("I")
        if kind not in FORMATS:
            raise MalformedError(f"{name} is stored in the unknown format {kind}")
        if sizes[0] % FORMATS[kind].num_elements:
            raise MalformedError(f"{name} has rows of {sizes[0]}, which {FORMATS[kind].name} cannot store")
        return name, tuple(reversed(sizes)), FORMATS[kind], self._cursor.number("Q")

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], BlockFormat, int]], alignment: int
    ) -> tuple[GgufTensor, ...]:
        """Return the tensors with their offsets in the file. Raises MalformedError if two overlap or share a name."""
        begin = -(-self._cursor.position // alignment) * alignment
        tensors = []
        for name, shape, block, offset in infos:
            if offset % alignment:
                raise MalformedError(f"{name} lies at {offset}, which is no multiple of {alignment}")
            num_bytes = math.prod(shape) // block.num_elements * block.num_bytes
            tensors.append(GgufTensor(name, shape, block, begin + offset, num_bytes))
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise MalformedError("two of its tensors have the same name")
        end = begin
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise MalformedError(f"{tensor.name} overlaps another tensor")
            end = tensor.offset + tensor.num_bytes
        return tuple(tensors)
