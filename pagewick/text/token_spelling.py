"""TokenSpelling: derives from a tokenizer's decoder which bytes each token adds to a text.

A decoder of the `tokenizers` library turns a sequence of tokens into a text. The decoders of language models work
token by token, except at the edges of the text. Any other decoder is refused, because its text cannot be streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from pagewick.errors import ModelLoadError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenSpelling:
    """Spells the tokens of one vocabulary. Raises ModelLoadError for a decoder that needs the whole text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._is_byte_level = self._has_byte_tokens = False
        self._replace: list[Callable[[str], str]] = []
        # Without a decoder, U+2581 at the start of a word still stands for a space.
        parts = [{"type": "Metaspace", "replacement": "\u2581"}] if decoder is None else [decoder]
        is_fused = False
        for part in _flatten(parts):
            kind = part["type"]
            if kind == "ByteLevel":
                self._is_byte_level = True
            elif kind == "ByteFallback":
                self._has_byte_tokens = True
            elif kind == "Fuse":
                is_fused = True
            # A step on the fused text that changes only its start concerns no other token.
            elif not (is_fused and kind == "Strip" and part["stop"] == 0):
                self._replace.append(_replacement(part))

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes, possibly part of a character, of a token that is not the first of its text."""
        for replace in self._replace:
            token = replace(token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._is_byte_level:
            try:
                return token.translate(_LATIN_1_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:  # an added token, which is spelled as it is
                return token.encode()
        return token.encode()


def _flatten(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    flat = []
    for part in parts:
        flat += _flatten(part["decoders"]) if part["type"] == "Sequence" else [part]
    return flat


def _replacement(part: dict[str, Any]) -> Callable[[str], str]:
    if part["type"] == "Metaspace":
        return lambda token: token.replace(part["replacement"], " ")
    if part["type"] == "Replace" and "String" in part["pattern"]:
        return lambda token: token.replace(part["pattern"]["String"], part["content"])
    if part["type"] == "WordPiece":
        return lambda token: _joined_to_words(token, part["prefix"], cleans_up=part["cleanup"])
    raise ModelLoadError(
        f"the tokenizer's decoder {json.dumps(part)} is not supported, because its text cannot be streamed token by "
        "token; use a model whose tokenizer is byte-level BPE, SentencePiece BPE, unigram or WordPiece"
    )


def _joined_to_words(token: str, prefix: str, *, cleans_up: bool) -> str:
    """Spell a token of WordPiece: one without the prefix begins a word, and some stand at the word before."""
    text = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    for dirty, clean in _CLEANED if cleans_up else ():
        text = text.replace(dirty, clean)
    return text


# The decoder of the tokenizers library replaces these, token by token and in this order.
_CLEANED = [
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
]  # fmt: skip


# GPT-2's map from printable characters to bytes (openai/gpt-2, `bytes_to_unicode` in src/encoder.py): visible Latin-1
# characters stand for themselves, and characters from U+0100 on for the other bytes.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}
CHAR_OF_LATIN_1 = str.maketrans({chr(byte): char for char, byte in _BYTE_OF_CHAR.items()})
# A character that stands for no byte becomes U+FFFF, which Latin-1 cannot encode.
_LATIN_1_OF_CHAR = str.maketrans(
    {chr(code): "\uffff" for code in range(256)} | {char: chr(byte) for char, byte in _BYTE_OF_CHAR.items()}
)
