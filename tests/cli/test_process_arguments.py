"""The command line in `ps` and /proc of a process that got secrets on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagewick.cli import process_arguments
from pagewick.cli.process_arguments import hide_values

SCRIPT = """
import sys
from pagewick.cli.process_arguments import hide_values
hide_values(["--api-key", "--token"])
print(sys.argv[1:], flush=True)
sys.stdin.read()
print(sys.orig_argv, flush=True)
"""


def shown(*arguments: str) -> tuple[list[str], str]:
    """Return the arguments in /proc of a process that has hidden their values, and those that it prints."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        argv = process.stdout.readline()
        in_proc = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
        process.stdin.close()
        return in_proc[3:-1], argv + process.stdout.read()


def test_values_are_hidden_everywhere() -> None:
    arguments = [
        "serve", "--api-key", "first secret", "--port", "8000", "--api-key=second-secret",
        "--token", "dritter Schlüssel",
        "--api_key", "third secret", "--api_key=fourth-secret", "--name=api_key", "a_b",
        "--api-keys", "not-one", "--api-key-file", "/keys", "--api-key=", "--name=--api-key", "x", "--api-key",
    ]  # fmt: skip
    expected = [
        "serve", "--api-key", "*" * 12, "--port", "8000", "--api-key=" + "*" * 13, "--token", "*" * 18,
        "--api_key", "*" * 12, "--api_key=" + "*" * 13, "--name=api_key", "a_b",
        "--api-keys", "not-one", "--api-key-file", "/keys", "--api-key=", "--name=--api-key", "x", "--api-key",
    ]  # fmt: skip
    in_proc, printed = shown(*arguments)
    assert in_proc == expected
    assert "secret" not in printed and "Schl" not in printed
    assert "'--api-key-file', '/keys'" in printed


def test_other_arguments_are_not_changed() -> None:
    arguments = ["serve", "--port", "8000", "", "a\nb"]
    in_proc, printed = shown(*arguments)
    assert in_proc == arguments and str(arguments) in printed


@pytest.mark.parametrize("path", ["/proc/nothing/stat", "/dev/null"])
def test_without_proc_only_the_lists_of_python_change(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(process_arguments, "Path", lambda _: Path(path))
    monkeypatch.setattr(sys, "argv", ["pagewick", "--api-key", "secret"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "pagewick", "--api-key=secret"])
    hide_values(["--api-key"])
    assert sys.argv == ["pagewick", "--api-key", "******"]
    assert sys.orig_argv == ["python", "pagewick", "--api-key=******"]
