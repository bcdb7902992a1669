"""Messages that a user types, of one line or several, and a history that outlives the chat."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

HISTORY_LENGTH = 1000
_BLOCK = '"""'

# Gets whether the line continues a message; returns it without its line break and raises EOFError at the end.
ReadLine = Callable[[bool], str]


def read_message(read_line: ReadLine) -> str:
    '''Read one message: a line, the lines up to one without a backslash at its end, or the text between two """.

    The end of the input ends a message that has begun. Raises EOFError if there is none.
    '''
    line = read_line(False)
    if line.strip().startswith(_BLOCK):
        return _read_block(line.strip().removeprefix(_BLOCK), read_line)
    lines = []
    with suppress(EOFError):
        while line.endswith("\\"):
            lines.append(line.removesuffix("\\"))
            line = ""
            line = read_line(True)
    return "\n".join([*lines, line]).strip()


def _read_block(line: str, read_line: ReadLine) -> str:
    lines = []
    with suppress(EOFError):
        while not line.rstrip().endswith(_BLOCK):
            lines.append(line)
            line = ""
            line = read_line(True)
    return "\n".join([*lines, line.rstrip().removesuffix(_BLOCK)]).strip("\n")


def history_path() -> Path:
    """Return $XDG_STATE_HOME/pagewick/chat_history."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pagewick" / "chat_history"


class LineEditor:
    """Reads lines from a terminal with readline's keys, if Python has it, and its history, in a file of mode 0600.

    If the file cannot be used, only the history is lost.
    """

    def __init__(self, path: Path, *, prompt_style: str = "") -> None:
        self._path = path
        # The marks tell readline not to count the characters of the style, which take no room on the screen.
        style, end = (f"\001{prompt_style}\002", "\001\x1b[0m\002") if prompt_style else ("", "")
        self._prompts = {False: f"{style}> {end}", True: f"{style}… {end}"}
        self._readline: ModuleType | None = None
        # Some builds of Python have no readline; where it exists, its import writes to some terminals.
        with suppress(ImportError):
            import readline

            self._readline = readline
        if self._readline is None:
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            path.chmod(0o600)
            self._readline.read_history_file(str(path))
        self._readline.set_history_length(HISTORY_LENGTH)

    def read_line(self, is_continuation: bool) -> str:
        """Read a line and save the history. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        line = input(self._prompts[is_continuation])
        if self._readline is not None:
            with suppress(OSError):
                self._readline.write_history_file(str(self._path))
                self._path.chmod(0o600)
        return line
