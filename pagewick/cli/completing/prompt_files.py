"""Text files with prompts or requests, read as they are needed: they may be larger than the memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from pagewick.errors import ConfigError

STDIN = "-"
_CHUNK_CHARS = 2**16
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\0": "\0"}


@contextmanager
def opened_text(name: str) -> Iterator[TextIO]:
    """Open a file, or stdin for "-". Raises ConfigError if it cannot be read, or later if it is not UTF-8."""
    with ExitStack() as stack:
        try:
            file = sys.stdin if name == STDIN else stack.enter_context(open(name, encoding="utf-8", newline="\n"))
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error.strerror}") from None
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file.name} is not UTF-8 ({error.reason}); convert it first") from None


def split_prompts(file: TextIO, separator: str) -> Iterator[str]:
    """Yield the texts between separators, without white space around them; omit empty ones."""
    held: list[str] = []
    # The end of the held text, in which a separator may have begun.
    end = ""
    # Chunks are lines, because a pipe that stays open returns no more than these.
    while chunk := file.readline(_CHUNK_CHARS):
        held.append(chunk)
        end += chunk
        if separator in end:
            *whole, end = "".join(held).split(separator)
            held = [end]
            yield from (text.strip() for text in whole if text.strip())
        end = end[max(0, len(end) - len(separator) + 1) :]
    if last := "".join(held).strip():
        yield last


def unescaped(separator: str) -> str:
    r"""Replace \n, \t and \0 in a separator by the characters that they mean. Raises ConfigError if it is empty."""
    for written, meant in _ESCAPES.items():
        separator = separator.replace(written, meant)
    if not separator:
        raise ConfigError("--separator must not be empty")
    return separator


def count_lines(name: str) -> int | None:
    """Return the number of lines that are not empty; None for a file that can be read only once."""
    if name == STDIN or not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        return sum(1 for line in file if line.strip())
