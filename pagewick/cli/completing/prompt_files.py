"""Files of prompts and of lines, read as they are needed: they may be larger than the memory."""

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
    """The file, or stdin for "-". Raises ConfigError if it cannot be read."""
    if name == STDIN:
        yield sys.stdin
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(name, encoding="utf-8", newline="\n"))
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error.strerror}") from None
        yield file


def split_prompts(file: TextIO, separator: str) -> Iterator[str]:
    """The texts between separators, without white space around them; empty ones are left out.

    Raises ConfigError if the file is not UTF-8.
    """
    held: list[str] = []
    # The end of what is held, in which a separator may have begun.
    end = ""
    for chunk in _chunks(file):
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
    r"""A separator as it is typed: \n, \t and \0 are what they are in most languages. Raises ConfigError."""
    for written, meant in _ESCAPES.items():
        separator = separator.replace(written, meant)
    if not separator:
        raise ConfigError("--separator must not be empty")
    return separator


def lines_of(file: TextIO) -> Iterator[str]:
    """Raises ConfigError if the file is not UTF-8."""
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise _not_text(file, error) from None


def count_lines(name: str) -> int | None:
    """How many lines that are not empty a file has; None for what can be read only once."""
    if name == STDIN or not Path(name).is_file():
        return None
    with open(name, "rb") as file:
        return sum(1 for line in file if line.strip())


def _chunks(file: TextIO) -> Iterator[str]:
    """By lines: a pipe that stays open gives no more than these."""
    try:
        while chunk := file.readline(_CHUNK_CHARS):
            yield chunk
    except UnicodeDecodeError as error:
        raise _not_text(file, error) from None


def _not_text(file: TextIO, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{file.name} is not UTF-8 ({error.reason}); convert it first")
