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
        self._texts = tokenizer.shown_texts if skip_special_tokens else tokenizer.all_texts
        self._held = b""  # the bytes of an incomplete character

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is a special token that the text omits."""
        return token_id in self._hidden

    @property
    def is_inside_character(self) -> bool:
        """Whether the last character is incomplete."""
        return bool(self._held)

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; empty inside a character."""
        if not self._held and (text := self._texts[token_id]) is not None:
            return text
        return self.feed_all((token_id,))

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        hidden, bytes_of = self._hidden, self._tokenizer.token_bytes
        new = self._held + b"".join([bytes_of(token_id) for token_id in token_ids if token_id not in hidden])
        text, num_bytes = codecs.utf_8_decode(new, "replace", False)
        self._held = new[num_bytes:]
        return text

    def flush(self) -> str:
        """End the text: return U+FFFD if the last character is incomplete, else nothing."""
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]
