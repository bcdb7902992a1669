"""Messages that are typed, and their history, in a process with a terminal of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagewick.cli.chatting.commands import completions
from pagewick.cli.chatting.line_input import history_path, read_message
from tests.cli.stand_in_server import StandInServer, chat_chunk, events


def read_all(*lines: str) -> list[str]:
    left = list(lines)
    continuations: list[bool] = []

    def read_line(is_continuation: bool) -> str:
        if not left:
            raise EOFError
        continuations.append(is_continuation)
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
        (["from the\nhistory\\", "b"], ["from the\nhistory\\", "b"]),
        ([], []),
    ],
)
def test_messages_of_one_line_and_several(lines: list[str], messages: list[str]) -> None:
    assert read_all(*lines) == messages


def test_the_history_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_path() == Path("/state/pagewick/chat_history")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert history_path() == Path("/home/x/.local/state/pagewick/chat_history")


class Terminal:
    """`pagewick chat` in a pseudo-terminal of 80 columns; `interrupt` sends the signal of Ctrl-C.

    is_typed: the keyboard is its stdin; otherwise stdin is a pipe, `process.stdin`.
    """

    def __init__(self, *arguments: str, environment: dict[str, str], is_typed: bool = True) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "pagewick", "chat", *arguments]
        settings = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **environment}
        self.process = subprocess.Popen(
            command,
            stdin=slave if is_typed else subprocess.PIPE,
            stdout=slave,
            stderr=slave,
            env=settings,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C at the prompt. Python notices a signal only once it waits for a key, just after the prompt."""
        wait_until_asleep(self.process.pid)
        self.process.send_signal(signal.SIGINT)

    def read_until(self, pattern: str) -> str:
        shown = ""
        while not re.search(pattern, shown, re.DOTALL):
            assert select.select([self._master], [], [], 60)[0], f"no more output after {shown!r}"
            shown += os.read(self._master, 4096).decode(errors="replace")
        self.shown += shown
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self._master)


def wait_until_asleep(pid: int) -> None:
    """Wait until a process waits for its terminal: its only thread sleeps, and uses no processor time for a while."""
    process = psutil.Process(pid)
    before, num_quiet = None, 0
    for _ in range(2000):
        now = process.cpu_times()
        is_quiet = process.status() == psutil.STATUS_SLEEPING and now == before
        before, num_quiet = now, num_quiet + 1 if is_quiet else 0
        if num_quiet == 3:
            return
        time.sleep(0.03)
    raise AssertionError("the process never waits")


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
        # Up twice, to the message of the first conversation.
        again.type("\x1b[A\x1b[A\n")
        again.read_until(r"1 tokens, first after.*> ")
    finally:
        again.close()
    assert server.requests[-1][2]["messages"] == [{"role": "user", "content": "hello"}]


def test_up_recalls_a_message_of_several_lines_as_a_whole(server: StandInServer, tmp_path: Path) -> None:
    for keys in ("first\\\nsecond\n", "\x1b[A\n"):
        terminal = open_terminal(server, tmp_path)
        try:
            terminal.read_until("> ")
            terminal.type(keys)
            terminal.read_until(r"1 tokens, first after.*> ")
        finally:
            terminal.close()
        assert server.requests[-1][2]["messages"] == [{"role": "user", "content": "first\nsecond"}]
    history = tmp_path / "pagewick" / "chat_history"
    assert history.read_text(encoding="utf-8") == "first\u2028second\n"
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_long_history_is_shortened(server: StandInServer, tmp_path: Path) -> None:
    history = tmp_path / "pagewick" / "chat_history"
    history.parent.mkdir()
    history.write_text("".join(f"message {number}\n" for number in range(1500)))
    terminal = open_terminal(server, tmp_path)
    try:
        terminal.read_until("> ")
    finally:
        terminal.close()
    assert history.read_text().splitlines() == [f"message {number}" for number in range(500, 1500)]


def test_tab_completes_a_command(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path)
    try:
        terminal.read_until("> ")
        terminal.type("/set temper\t0.5\n")
        assert "temperature = 0.5  (changed)" in terminal.read_until(r"\(changed\).*> ")
        terminal.type("/exi\t\n")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/re", ["/reset", "/retry"]),
        ("/s", ["/system ", "/set ", "/save "]),
        ("/set temp", ["temperature "]),
        ("/set thinking o", ["on", "off"]),
        ("/load {folder}/ta", ["{folder}/tales/", "{folder}/talk.json"]),
        ("/undo x", []),
        ("a message /re", []),
        ("//re", []),
        ("", []),
    ],
)
def test_completions(tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "talk.json").touch()
    (tmp_path / "tales").mkdir()
    line = line.format(folder=tmp_path)
    word = line.rpartition(" ")[2]
    assert completions(line, word) == [one.format(folder=tmp_path) for one in expected]


@pytest.mark.usefixtures("ctrl_c_interrupts")
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


def test_no_color_turns_colours_off(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path, "--plain", NO_COLOR="1")
    try:
        terminal.read_until("> ")
        terminal.type("hello\n")
        terminal.read_until(r"first after.*> ")
    finally:
        terminal.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.shown)


def test_a_dumb_terminal_gets_no_escape_codes(server: StandInServer, tmp_path: Path) -> None:
    terminal = open_terminal(server, tmp_path, TERM="dumb")
    try:
        terminal.read_until("> ")
        terminal.type("hello\n")
        assert "\x1b" not in terminal.read_until(r"first after.*> ")
    finally:
        terminal.close()


EVIL = "\x1b]0;title\x07 \x9b"


def test_text_from_elsewhere_cannot_control_the_terminal(server: StandInServer, tmp_path: Path) -> None:
    """The model's name, a system message, thoughts and errors."""
    server.models = [f"name{EVIL}"]
    (tmp_path / "talk.json").write_text(json.dumps([{"role": "system", "content": f"system{EVIL}"}]))
    replies = iter(
        [events(chat_chunk(reasoning=f"thought{EVIL}"), chat_chunk(content="Hi")), events({"choices": EVIL})]
    )
    server.reply = lambda body: (200, next(replies))
    terminal = open_terminal(server, tmp_path)
    try:
        terminal.read_until(r"name.*/help lists.*> ")
        terminal.type(f"/load {tmp_path / 'talk.json'}\n")
        terminal.read_until(r"Loaded.*> ")
        terminal.type("/system\n")
        terminal.read_until(r"message is: system�.*> ")
        terminal.type("hello\n")
        terminal.read_until(r"first after.*> ")
        terminal.type("/thoughts\n")
        terminal.read_until(r"thought�.*> ")
        terminal.type("again\n")
        terminal.read_until(r"an event that no.*> ")
    finally:
        terminal.close()
    assert "\x1b]" not in terminal.shown
    assert "\x9b" not in terminal.shown


@pytest.mark.parametrize("kind", ["content", "reasoning"])
def test_responses_to_a_message_from_a_pipe_cannot_control_the_terminal(
    server: StandInServer, tmp_path: Path, kind: str
) -> None:
    server.reply = lambda body: (200, events(chat_chunk(**{kind: f"text{EVIL}"}), chat_chunk(content="Hi")))
    arguments = ("--url", server.url, "--show-thinking")
    terminal = Terminal(*arguments, environment={"XDG_STATE_HOME": str(tmp_path)}, is_typed=False)
    try:
        assert terminal.process.stdin is not None
        terminal.process.stdin.write(b"hello\n")
        terminal.process.stdin.flush()
        assert "text�]0;title� �" in terminal.read_until("Hi")
    finally:
        terminal.close()
