"""SentencePieceModel: reads a `tokenizer.model` file without the sentencepiece library.

Source of the field numbers and defaults: google/sentencepiece, src/sentencepiece_model.proto. The wire format is
Protocol Buffers' (protobuf.dev/programming-guides/encoding): a message is a list of (field number, wire type, value).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pagewick.errors import ModelLoadError

# Gemma's file, the largest known, has 4 MB. A file takes a multiple of its size in memory.
MAX_MODEL_BYTES = 64 * 2**20

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_UNIGRAM, _BPE, _WORD, _CHAR = 1, 2, 3, 4
_MODEL_TYPES = {_UNIGRAM: "unigram", _BPE: "bpe", _WORD: "word", _CHAR: "char"}

# Set in a unit of a charsmap that ends a text.
_LEAF = 1 << 31
_MAX_REPLACEMENT_BYTES = 128

_Value = int | bytes


class PieceType(IntEnum):
    """The type of a piece. CONTROL pieces never match text; USER_DEFINED pieces match before all others."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry of the vocabulary; its index is its id.

    score: BPE merges pieces with a higher score earlier; for unigram it is the logarithm of the probability.
    """

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A vocabulary and the normalisation of text before the lookup.

    is_unigram: unigram rather than byte pair encoding. charsmap: the compiled rules of Unicode normalisation; empty for
    none. An id is None if the model has no such piece.
    """

    pieces: tuple[Piece, ...]
    is_unigram: bool
    has_byte_fallback: bool
    unk_id: int
    bos_id: int | None
    eos_id: int | None
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_whitespaces: bool

    @classmethod
    def read(cls, file: Path) -> SentencePieceModel:
        """Read a file. Raises ModelLoadError if it is damaged or needs a feature that is not supported."""
        if file.stat().st_size > MAX_MODEL_BYTES:
            raise ModelLoadError(f"{file} is larger than {MAX_MODEL_BYTES} bytes; it is not a tokenizer")
        data = file.read_bytes()
        if _is_tiktoken(data):
            raise ModelLoadError(
                f"{file} is a tiktoken vocabulary, which does not say how text is split; use the repository "
                "made for transformers, with a tokenizer.json"
            )
        try:
            return _parse_model(data)
        except _Damage as damage:
            raise ModelLoadError(f"{file} is not a usable SentencePiece model ({damage}); download it again") from None
        except _Unsupported as error:
            raise ModelLoadError(f"{file} cannot be used: {error}; use a model that has a tokenizer.json") from None


class _Damage(Exception):
    """The file does not follow the format."""


class _Unsupported(Exception):
    """The model is valid and needs a feature that could only be approximated."""


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    specs: dict[int, dict[int, _Value]] = {2: {}, 3: {}, 5: {}}
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_parse_piece(dict(_fields(_as_bytes(value))), len(pieces)))
        elif field in specs:
            specs[field] |= dict(_fields(_as_bytes(value)))
    trainer, normalizer, denormalizer = specs.values()
    model_type = _as_int(trainer.get(3, _UNIGRAM))
    if model_type not in (_UNIGRAM, _BPE):
        raise _Unsupported(f"its kind is {_MODEL_TYPES.get(model_type, model_type)}; bpe and unigram are supported")
    if trainer.get(24, 0):
        raise _Unsupported("it puts spaces behind words (treat_whitespace_as_suffix), which is not supported")
    if not normalizer.get(5, 1):
        raise _Unsupported("it leaves spaces as they are (escape_whitespaces is off), which is not supported")
    if denormalizer.get(2, b""):
        raise _Unsupported("it changes the text after decoding (denormalizer_spec), which is not supported")
    unknown = [index for index, piece in enumerate(pieces) if piece.type is PieceType.UNKNOWN]
    if len(unknown) != 1:
        raise _Damage(f"{len(unknown)} of its {len(pieces)} pieces stand for unknown characters, not one")
    if len({piece.text for piece in pieces}) != len(pieces):
        raise _Damage("a piece is in it twice")
    model = SentencePieceModel(
        pieces=tuple(pieces),
        is_unigram=model_type == _UNIGRAM,
        has_byte_fallback=bool(_as_int(trainer.get(35, 0))),
        unk_id=unknown[0],
        bos_id=_control_id(pieces, _as_int(trainer.get(41, 1)), trainer.get(46, b"<s>")),
        eos_id=_control_id(pieces, _as_int(trainer.get(42, 2)), trainer.get(47, b"</s>")),
        charsmap=_as_bytes(normalizer.get(2, b"")),
        adds_dummy_prefix=bool(_as_int(normalizer.get(3, 1))),
        removes_extra_whitespaces=bool(_as_int(normalizer.get(4, 1))),
    )
    found = {piece.text for piece in pieces if piece.type is PieceType.BYTE}
    wanted = {f"<0x{byte:02X}>" for byte in range(256)} if model.has_byte_fallback else set()
    if found != wanted:
        raise _Damage(f"it has {len(found)} pieces for single bytes, not {len(wanted)}")
    if model.charsmap and (damage := charsmap_damage(model.charsmap)):
        raise _Damage(f"its rules of normalisation: {damage}")
    return model


def _parse_piece(fields: dict[int, _Value], index: int) -> Piece:
    try:
        text = _as_bytes(fields.get(1, b"")).decode()
        type_ = PieceType(_as_int(fields.get(3, PieceType.NORMAL)))
    except ValueError as error:
        raise _Damage(f"piece {index}: {error}") from None
    (score,) = struct.unpack("<f", struct.pack("<I", _as_int(fields.get(2, 0)) & 0xFFFFFFFF))
    if not text or score != score or abs(score) == float("inf"):
        raise _Damage(f"piece {index} has {'no text' if not text else f'the score {score}'}")
    if type_ is PieceType.UNUSED:
        raise _Unsupported(f"piece {text!r} is marked as unused, which is not supported")
    return Piece(text, score, type_)


def _control_id(pieces: list[Piece], token_id: int, text: _Value) -> int | None:
    """Find the bos or eos token. The library looks it up by name; in some models the stored id is wrong."""
    named = [index for index, piece in enumerate(pieces) if piece.text.encode() == text]
    if named:
        return named[0]
    is_there = 0 <= token_id < len(pieces) and pieces[token_id].type is PieceType.CONTROL
    return token_id if is_there else None


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield number and value of a message's fields: numbers as unsigned integers, everything else as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        field, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position)
            yield field, value
            continue
        if wire_type == _BYTES:
            size, position = _varint(data, position)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise _Damage(f"no field is of wire type {wire_type}")
        end = position + size
        if not field or end > len(data):
            raise _Damage("it ends within a field" if field else "a field has the number 0")
        raw = data[position:end]
        yield field, raw if wire_type == _BYTES else int.from_bytes(raw, "little")
        position = end


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Read the number at a position, in groups of seven bits; returns it and the position after it."""
    number = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, position + index + 1
    raise _Damage("it ends within a number, or a number has more than 64 bits")


def _as_bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise _Damage("a number is where a text should be")
    return value


def _as_int(value: _Value) -> int:
    """Interpret a field's number as signed."""
    if not isinstance(value, int):
        raise _Damage("a text is where a number should be")
    return value - 2**64 if value >= 2**63 else value


def _is_tiktoken(data: bytes) -> bool:
    """Whether each line is a token in base64 and its rank: Llama 3 and GLM-4 use the same file name for that format."""
    token, _, rank = data[:4096].partition(b"\n")[0].strip().partition(b" ")
    try:
        return bool(base64.b64decode(token, validate=True)) and rank.isdigit()
    except binascii.Error:
        return False


def charsmap_damage(charsmap: bytes) -> str:
    """Return what is wrong with compiled rules of Unicode normalisation; empty if they are safe for any text.

    The library that applies them trusts every number, and aborts the process if one points out of the table. Layout:
    the size of a table in bytes, the table (a double-array trie over UTF-8), then the replacements, each ended by a
    zero byte. Sources: google/sentencepiece, src/normalizer.cc (the layout); s-yata/darts-clone, include/darts.h (the
    units of the table: `offset`, `has_leaf`, `value`).
    """
    if len(charsmap) < 4:
        return "they have no table"
    (num_bytes,) = struct.unpack_from("<I", charsmap)
    replacements = charsmap[4 + num_bytes :]
    # From any unit, any byte leads on within a group of 256 units.
    if not num_bytes or num_bytes % 1024 or len(charsmap) < 4 + num_bytes:
        return f"they cannot have a table of {num_bytes} bytes"
    try:
        replacements.decode()
    except UnicodeDecodeError:
        return "the replacements are not UTF-8"
    # Those of Unicode have at most 33 bytes; each may take the place of a single one.
    if (longest := max(map(len, replacements.split(b"\0")))) > _MAX_REPLACEMENT_BYTES:
        return f"a replacement has {longest:,} bytes, more than {_MAX_REPLACEMENT_BYTES}"
    units = struct.unpack_from(f"<{num_bytes // 4}I", charsmap, 4)
    for index, unit in enumerate(units):
        if unit & _LEAF:
            continue
        target = index ^ ((unit >> 10) << ((unit & 1 << 9) >> 6))
        if target >= len(units):
            return f"unit {index} leads out of the table"
        place = units[target] & ~_LEAF
        # A replacement has to start at the first byte of a UTF-8 character.
        if unit & 1 << 8 and (place >= len(replacements) or replacements[place] & 0xC0 == 0x80):
            return f"unit {index} leads to no replacement"
    return ""
