"""The commands as processes on a real, tiny model: responses, pipes, a terminal, several ranks, mistakes."""

from __future__ import annotations

import json
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

from pagewick.llm import LLM
from pagewick.sampling_params import SamplingParams

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
PROMPTS = ["def f(x):", "import os", "class A"]
GREEDY = ("--temperature", "0", "--dtype", "float32", "--max-model-len", "128")


def run(*arguments: str, stdin: str = "", launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "pagewick", *arguments]
    return subprocess.run(
        command, input=stdin, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def responses(tiny_model: Path) -> list[str]:
    """The responses to PROMPTS from the Python API in this process."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(tiny_model), dtype="float32", max_model_len=128) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def test_complete_prints_the_responses_of_the_python_api(tiny_model: Path, responses: list[str]) -> None:
    result = run("complete", str(tiny_model), "--prompts", " | ".join(PROMPTS), "--json", "--max-tokens", "12", *GREEDY)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == responses
    assert result.stderr == ""


def test_two_ranks_of_torchrun_give_the_same_responses(tiny_model: Path, responses: list[str]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ("complete", str(tiny_model), "--prompts", " | ".join(PROMPTS), "--json", "--max-tokens", "12", *GREEDY)
    result = run(*arguments, launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == responses


def test_chat_responds_to_the_lines_of_a_pipe(tiny_model: Path) -> None:
    result = run("chat", str(tiny_model), "--max-tokens", "4", *GREEDY, stdin="hello\n/reset\nhello\n/exit\nnever\n")
    assert result.returncode == 0, result.stderr
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:]
    assert half > 1


def test_a_missing_model_is_a_short_error(tmp_path: Path) -> None:
    result = run("complete", str(tmp_path / "nothing"), "-p", "x")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) <= 6


class Terminal:
    """`pagewick chat` in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "pagewick", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, pattern: str) -> str:
        """Return the output from now on, up to a match."""
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
def terminal(tiny_model: Path) -> Iterator[Terminal]:
    terminal = Terminal(str(tiny_model), "--temperature", "0", "--max-model-len", "4096")
    yield terminal
    terminal.close()


def test_a_conversation_in_a_terminal(terminal: Terminal) -> None:
    """Random weights never end a response: it is stopped with Ctrl-C, and the next message is sent."""
    assert "/reset starts anew" in terminal.read_until("> ")
    for _ in range(2):
        terminal.type("hello\n")
        terminal.read_until(r"hello\r?\n.{20}")
        # The signal that the terminal's driver sends at Ctrl-C.
        terminal.process.send_signal(signal.SIGINT)
        assert "tokens, first after" in terminal.read_until(r"\(stopped\).*per second.*> ")
    terminal.type("/help\n")
    terminal.read_until("Ctrl-C stops a response.*> ")
    terminal.type("/reset\n")
    terminal.read_until("A new conversation.*> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(timeout=60) == 0
    assert "Traceback" not in terminal.shown


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_complete_without_a_traceback(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "pagewick", "complete", str(tiny_model), "-p", "def", "--max-model-len", "32000"]
    # A random choice of tokens would end the response within tenths of a second; the most likely tokens do not.
    command += ["--temperature", "0"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors
