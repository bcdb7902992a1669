"""Detokenizer: token ids to text, one at a time."""

from __future__ import annotations

import codecs

from pagewick.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns output tokens into text in constant time per token.

    What `feed` and a final `flush` return, joined, is the UTF-8 text of all tokens' bytes, however they were
    cut. A character is returned when its last byte has come. The text goes on from a prompt, so that a
    leading space stays, which a sentencepiece vocabulary's own `decode` removes.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is a special one that is left out of the text."""
        return token_id in self._hidden

    @property
    def is_inside_character(self) -> bool:
        """Whether the last character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token_id: int) -> str:
        """The text that became complete with this token; empty inside a character."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The end of the text: U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
