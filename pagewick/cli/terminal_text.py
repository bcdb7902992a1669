"""Text from elsewhere (a model, a server, a file), made safe for a terminal."""

from __future__ import annotations

import re
from typing import TextIO

# Control characters of ASCII and Latin-1 except tab and line feed, and surrogates, which are not text.
_HARMFUL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

# An error or a report may quote what a file holds: a name of a megabyte would scroll away everything else.
_MAX_LINE_CHARS = 2000


def harmless(text: str) -> str:
    """Replace control characters, so that nobody can send commands to the terminal."""
    return _HARMFUL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def shown_on(stream: TextIO, text: str) -> str:
    """Return the text to write to a stream: unchanged for a file or a pipe, harmless for a terminal."""
    return harmless(text) if stream.isatty() else text


def harmless_lines(text: str) -> str:
    """Return an error or a report for a terminal: without control characters, and with no line that is very long."""
    lines = harmless(text).split("\n")
    half = _MAX_LINE_CHARS // 2
    return "\n".join(line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}" for line in lines)
