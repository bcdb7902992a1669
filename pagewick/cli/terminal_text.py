"""What others wrote (a model, a server, a file), made fit for a terminal."""

from __future__ import annotations

import re
from typing import TextIO

# The control characters of ASCII and Latin-1 but tab and line feed, and halves of characters, which are no text.
_HARMFUL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text without control characters, so that nobody can send commands to the terminal."""
    return _HARMFUL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def shown_on(stream: TextIO, text: str) -> str:
    """What is to be written to a stream: the text as it is to a file or a pipe, harmless text to a terminal."""
    return harmless(text) if stream.isatty() else text
