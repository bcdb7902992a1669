"""What a user types: messages of one line or several, and a history that outlives the chat."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

HISTORY_LENGTH = 1000
_BLOCK = '"""'

# Gets whether the line goes on a message, and returns it without its line break; raises EOFError at the end.
ReadLine = Callable[[bool], str]


def read_message(read_line: ReadLine) -> str:
    '''One message. A backslash at a line's end goes on on the next line; what is between """ is taken as it is.

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
    """$XDG_STATE_HOME/pagewick/chat_history"""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pagewick" / "chat_history"


class LineEditor:
    """Reads lines from a terminal with readline's keys, where Python has it, and its history, in a file of mode 0600.

    Nothing is lost but the history where the file cannot be used.
    """

    def __init__(self, path: Path, *, prompt_style: str = "") -> None:
        self._path = path
        # readline must not count what takes no room on the screen.
        style, end = (f"\001{prompt_style}\002", "\001\x1b[0m\002") if prompt_style else ("", "")
        self._prompts = {False: f"{style}> {end}", True: f"{style}… {end}"}
        self._readline = _readline()
        if self._readline is None:
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
            path.chmod(0o600)
            self._readline.read_history_file(str(path))
        self._readline.set_history_length(HISTORY_LENGTH)

    def read_line(self, goes_on: bool) -> str:
        """Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        line = input(self._prompts[goes_on])
        self._keep_history()
        return line

    def _keep_history(self) -> None:
        if self._readline is None:
            return
        with suppress(OSError):
            self._readline.write_history_file(str(self._path))
            self._path.chmod(0o600)


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline
