"""Messages as they are typed, and the history of a terminal, in a process with a terminal of its own."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewick.cli.chatting.line_input import history_path, read_message
from tests.cli.stand_in_server import StandInServer


def read_all(*lines: str) -> list[str]:
    left = list(lines)
    continuations: list[bool] = []

    def read_line(goes_on: bool) -> str:
        if not left:
            raise EOFError
        continuations.append(goes_on)
        return left.pop(0)

    messages = []
    try:
        while True:
            messages.append(read_message(read_line))
    except EOFError:
        return messages


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["  a ", "", "b"], ["a", "", "b"]),
        (["a\\", " b\\", "c", "d"], ["a\n b\nc", "d"]),
        (["a\\"], ["a"]),
        (['"""', "a", "", "  b\\", '"""', "c"], ["a\n\n  b\\", "c"]),
        (['"""a', 'b"""'], ["a\nb"]),
        (['"""a"""', "b"], ["a", "b"]),
        (['"""a', "b"], ["a\nb"]),
        ([], []),
    ],
)
def test_messages_of_one_line_and_several(lines: list[str], messages: list[str]) -> None:
    assert read_all(*lines) == messages


def test_the_history_is_kept_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_path() == Path("/state/pagewick/chat_history")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert history_path() == Path("/home/x/.local/state/pagewick/chat_history")


class Terminal:
    """`pagewick chat` in a pseudo-terminal of 80 columns; a signal goes to it as the keyboard's driver sends it."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "pagewick", "chat", *arguments]
        settings = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **environment}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=settings, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does at the prompt. Python notices a signal only once it waits for a key, just after the prompt."""
        time.sleep(0.3)
        self.process.send_signal(signal.SIGINT)

    def read_until(self, pattern: str) -> str:
        shown = ""
        while not re.search(pattern, shown, re.DOTALL):
            shown += os.read(self._master, 4096).decode(errors="replace")
        self.shown += shown
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def server() -> Iterator[StandInServer]:
    with StandInServer().running() as server:
        yield server


def open_terminal(server: StandInServer, state: Path, *arguments: str, **environment: str) -> Terminal:
    return Terminal("--url", server.url, *arguments, environment={"XDG_STATE_HOME": str(state), **environment})


def test_a_conversation_with_a_history(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path)
    try:
        terminal.read_until(r"stand-in.*/help lists.*> ")
        terminal.type("hello\n")
        assert "Hi" in terminal.read_until(r"1 tokens, first after.*> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()
    history = tmp_path / "pagewick" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["hello", "/exit"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    assert "\x1b[?25h" in terminal.shown

    again = open_terminal(server, tmp_path)
    try:
        again.read_until("> ")
        # Twice up, to the message of the conversation before.
        again.type("\x1b[A\x1b[A\n")
        again.read_until(r"1 tokens, first after.*> ")
    finally:
        again.close()
    assert server.requests[-1][2]["messages"] == [{"role": "user", "content": "hello"}]


def test_ctrl_c_twice_leaves(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path)
    try:
        terminal.read_until("> ")
        terminal.interrupt()
        terminal.read_until("Ctrl-C again leaves.*> ")
        terminal.interrupt()
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()
    assert "Traceback" not in terminal.shown


def test_colours_are_left_out_if_nobody_wants_them(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path, "--plain", NO_COLOR="1")
    try:
        terminal.read_until("> ")
        terminal.type("hello\n")
        terminal.read_until(r"first after.*> ")
    finally:
        terminal.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.shown)


def test_a_terminal_that_knows_no_codes_gets_none(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path, TERM="dumb")
    try:
        terminal.read_until("> ")
        terminal.type("hello\n")
        assert "\x1b" not in terminal.read_until(r"first after.*> ")
    finally:
        terminal.close()
