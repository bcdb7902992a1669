"""LLTokenizer of a model: llguidance's form of the vocabulary, with the bytes that our own detokenizer writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from pagewick.text.tokenizer import Tokenizer

# Tags that a model writes as one token, though its tokenizer does not call them special.
_TAG = re.compile(r"[<\[\u25c1]\S+[>\]\u25b7]")
# A grammar that is too complex fails while it is compiled, or at a token. These are llguidance's own limits.
LIMITS = LLParserLimits(verbose_errors=False)
# Groups of tokens that a mask takes as a whole where a grammar allows any text of their form: blanks, and text inside a
# JSON string. A string near its maxLength allows only short tokens; llguidance's own groups have 10 or 30 characters.
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (3, 6, 9, 12, 16, 24, 40)
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{length}}}" for length in _LENGTHS),
    f"{_STRING_CHARACTER}+",
]


def special_tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the tokens that free text does not contain, and which grammars name: id -> the bytes of the name."""
    found = {}
    for text, is_special in tokenizer.added_tokens.items():
        token_id = tokenizer.id_of(text)
        if token_id is not None and (is_special or _TAG.fullmatch(text)):
            found[token_id] = text.encode()
    return found


class _Vocabulary:
    """The object that TokenizerWrapper wraps. The token that ends a response is one more than the model has."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special_token_ids, self.eos_token_id]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # the wrapper tries whether bytes are accepted
            raise TypeError("only text is encoded")
        return self._encode(text)


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """vocab_size: the model's; it may have more tokens than the tokenizer, or fewer. Takes a while."""
    special = {token_id: name for token_id, name in special_tokens(tokenizer).items() if token_id < vocab_size}
    tokens = [b""] * vocab_size
    for token_id, content in tokenizer.iterate_token_bytes(vocab_size):
        # llguidance marks special tokens with the byte 0xFF. No text in UTF-8 has it, so no grammar needs such a token.
        tokens[token_id] = special.get(token_id, b"" if content.startswith(b"\xff") else content)
    encode = partial(_encode, tokenizer)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, list(special), encode)), slices=SLICES)


def make_small_vocabulary(special: Mapping[int, bytes], vocab_size: int) -> LLTokenizer:
    """Return a vocabulary of single bytes, to try a grammar with. special: as from `special_tokens`."""
    tokens = [special.get(token_id, b"") for token_id in range(vocab_size)]
    tokens += [bytes([value]) for value in range(256)]
    return LLTokenizer(
        TokenizerWrapper(
            _Vocabulary(tokens, list(special), lambda text: [vocab_size + value for value in text.encode()])
        )
    )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_pieces(["", text])
