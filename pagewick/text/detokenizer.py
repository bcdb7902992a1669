"""Detokenizer: turns token ids into text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pagewick.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns output tokens into text in constant time per token.

    The joined results of all calls of `feed` and a final `flush` are the UTF-8 text of all tokens' bytes. A character
    is returned once its last byte is known. The text continues a prompt, so a leading space stays; the `decode` of a
    SentencePiece vocabulary would remove it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is a special token that the text omits."""
        return token_id in self._hidden

    @property
    def is_inside_character(self) -> bool:
        """Whether the last character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; empty inside a character."""
        return self.feed_all((token_id,))

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        hidden, bytes_of = self._hidden, self._tokenizer.token_bytes
        if len(token_ids) == 1:
            (token_id,) = token_ids
            return "" if token_id in hidden else self._decode(bytes_of(token_id))
        return self._decode(b"".join([bytes_of(token_id) for token_id in token_ids if token_id not in hidden]))

    def flush(self) -> str:
        """End the text: return U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
