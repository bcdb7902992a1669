"""Cutter: keeps what a user wrote from being read as a control token.

Wherever one starts in a string, a CUT character goes in after its first character. Text is then split at the cuts and
encoded piece by piece (Tokenizer.encode_pieces), so that "<" and "|im_start|>" are two texts, neither of which is a
token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError

# A character that Unicode sets apart for a program's own use. It marks a place where no token may go across;
# whatever a user's text does with it is a mere cut.
CUT = "\ufdd0"


class Cutter:
    """Puts a CUT into every place where one of the tokens starts, after its first character. Tokens may overlap."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = frozenset(tokens) - {""}
        self._lengths = sorted(set(map(len, self._tokens)))
        first_chars = "".join(sorted({re.escape(token[0]) for token in self._tokens}))
        self._first_char = re.compile(f"[{first_chars}]" if first_chars else "(?!)")

    def cut(self, value: Any) -> Any:
        """The value, plain data, with all its strings cut."""
        if isinstance(value, str):
            return self._first_char.sub(self._mark, str(value))
        if isinstance(value, Mapping):
            return {self.cut(key): self.cut(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.cut(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise InvalidRequestError(f"messages must be plain data; got a {type(value).__name__}", param="messages")

    def _mark(self, match: re.Match[str]) -> str:
        text, start = match.string, match.start()
        # Some vocabularies have thousands of special tokens, but few lengths of them.
        is_token = any(text[start : start + length] in self._tokens for length in self._lengths)
        return match[0] + CUT if is_token else match[0]
