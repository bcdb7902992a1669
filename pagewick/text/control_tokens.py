"""Cutter: prevents text from a user from being encoded as a control token.

Cutter inserts a CUT character after the first character of every control token in a string. The text is then split at
the cuts and encoded piece by piece (Tokenizer.encode_pieces): "<" and "|im_start|>" are two texts, neither of which is
a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError

# Unicode reserves this noncharacter for internal use. If a user's text contains one, it is merely split there.
CUT = "\ufdd0"


class Cutter:
    """Inserts a CUT after the first character of every occurrence of the given tokens, which may overlap."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = frozenset(tokens) - {""}
        self._lengths = sorted(set(map(len, self._tokens)))
        first_chars = "".join(sorted({re.escape(token[0]) for token in self._tokens}))
        self._first_char = re.compile(f"[{first_chars}]" if first_chars else "(?!)")

    def cut(self, value: Any) -> Any:
        """Return plain data with all its strings cut. Raises InvalidRequestError for other types."""
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
