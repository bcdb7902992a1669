"""Text that users give in files and on stdin: UTF-8, with or without a byte order mark, with any line ends."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from pagewick.errors import ConfigError

STDIN = "-"
# UTF-8, without the byte order mark that programs of Windows write before it.
_ENCODING = "utf-8-sig"
_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def opened_text(name: str, *, keeps_bytes: bool = False) -> Iterator[TextIO]:
    """Open a file, or stdin for "-". Raises ConfigError if it cannot be read, or later if it is not UTF-8.

    Every line ends with a line feed, whatever ends it in the file. stdin may be opened again to read on.
    keeps_bytes: bytes that are not UTF-8 are no error, but lone surrogates in the text, which `is_decoded` finds.
    """
    errors = "surrogateescape" if keeps_bytes else "strict"
    with ExitStack() as stack:
        try:
            if name == STDIN:
                file = _stdin(errors)
            else:
                file = stack.enter_context(open(name, encoding=_ENCODING, errors=errors))
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error.strerror}; check the path") from None
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file.name} is not UTF-8 ({error.reason}); convert it first") from None


def is_decoded(text: str) -> bool:
    """Whether all bytes of a text that `opened_text` has read were UTF-8, in which no surrogate can be written."""
    return text.isascii() or _SURROGATE.search(text) is None


def read_text(path: Path) -> str:
    """Return the text of a file. Raises OSError, and UnicodeDecodeError if it is not UTF-8."""
    return path.read_text(encoding=_ENCODING)


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Say why `read_text` failed."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"it is not UTF-8: {error.reason} at byte {error.start}"


def count_lines(name: str) -> int | None:
    """Return the number of lines that are not empty; None for a file that can be read only once."""
    if name == STDIN or not Path(name).is_file():
        return None
    with open(name, encoding=_ENCODING, errors="replace") as file:
        return sum(1 for line in file if line.strip())


def _stdin(errors: str) -> TextIO:
    """Return stdin, which is UTF-8 like files, unless the user's locale has another encoding."""
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.encoding.lower() == "utf-8":
        # Without a locale, Python would let bytes pass that are not UTF-8.
        sys.stdin.reconfigure(encoding=_ENCODING, errors=errors)
    return sys.stdin
