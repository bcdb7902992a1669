"""Messages that a user types, of one line or several, and a history that outlives the chat."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

HISTORY_LENGTH = 1000
_BLOCK = '"""'
# Stands for a line break in the file of the history, where each message has one line.
_LINE_SEPARATOR = "\u2028"

# Gets whether the line continues a message; returns it without its line break and raises EOFError at the end.
ReadLine = Callable[[bool], str]


def read_message(read_line: ReadLine) -> str:
    '''Read one message: a line, the lines up to one without a backslash at its end, or the text between two """.

    The end of the input ends a message that has begun. Raises EOFError if there is none.
    '''
    line = read_line(False)
    if "\n" in line:  # a message from the history
        return line.strip()
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

    complete: gets the line up to the cursor and its last word, and returns what may stand in place of that word. If the
    file cannot be used, only the history is lost.
    """

    def __init__(self, path: Path, complete: Callable[[str, str], Sequence[str]], *, prompt_style: str = "") -> None:
        self._path = path
        self._complete = complete
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
        # A message is remembered as a whole, and not line by line.
        self._readline.set_auto_history(False)
        self._readline.set_completer(self._completion)
        self._readline.set_completer_delims(" \t\n")
        is_editline = "libedit" in (self._readline.__doc__ or "")
        self._readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
        with suppress(OSError):
            for message in self._load():
                self._readline.add_history(message)

    def read_line(self, is_continuation: bool) -> str:
        """Read a line, or a message from the history. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        return input(self._prompts[is_continuation])

    def remember(self, message: str) -> None:
        """Add a message to the history, unless it is empty or the last one there."""
        if self._readline is None or not message:
            return
        if message != self._readline.get_history_item(self._readline.get_current_history_length()):
            self._readline.add_history(message)
            with suppress(OSError):
                self._append(message)

    def _load(self) -> list[str]:
        """Read the messages of the file, which is shortened if it has too many."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDONLY, 0o600))
        self._path.chmod(0o600)
        lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        if len(lines) > HISTORY_LENGTH:
            lines = lines[-HISTORY_LENGTH:]
            self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return [line.replace(_LINE_SEPARATOR, "\n") for line in lines]

    def _append(self, message: str) -> None:
        with open(self._path, "a", encoding="utf-8", errors="replace") as file:
            file.write(message.replace("\n", _LINE_SEPARATOR) + "\n")

    def _completion(self, word: str, index: int) -> str | None:
        """Return a completion of the word before the cursor by its index, as readline asks; None after the last."""
        assert self._readline is not None, "readline calls this"
        found = self._complete(self._readline.get_line_buffer()[: self._readline.get_endidx()], word)
        return found[index] if index < len(found) else None
