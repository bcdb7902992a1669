"""What `ps` and /proc show of a process that was given secrets on its command line."""

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
    """The arguments in /proc of a process that has hidden them, and what it says they are."""
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
        "--api-keys", "not-one", "--api-key-file", "/keys", "--api-key=", "--name=--api-key", "x", "--api-key",
    ]  # fmt: skip
    expected = [
        "serve", "--api-key", "*" * 12, "--port", "8000", "--api-key=" + "*" * 13, "--token", "*" * 18,
        "--api-keys", "not-one", "--api-key-file", "/keys", "--api-key=", "--name=--api-key", "x", "--api-key",
    ]  # fmt: skip
    in_proc, said = shown(*arguments)
    assert in_proc == expected
    assert "secret" not in said and "Schl" not in said
    assert "'--api-key-file', '/keys'" in said


def test_nothing_to_hide_changes_nothing() -> None:
    arguments = ["serve", "--port", "8000", "", "a\nb"]
    in_proc, said = shown(*arguments)
    assert in_proc == arguments and str(arguments) in said


@pytest.mark.parametrize("path", ["/proc/nothing/stat", "/dev/null"])
def test_without_proc_at_least_python_hides_them(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(process_arguments, "Path", lambda _: Path(path))
    monkeypatch.setattr(sys, "argv", ["pagewick", "--api-key", "secret"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "pagewick", "--api-key=secret"])
    hide_values(["--api-key"])
    assert sys.argv == ["pagewick", "--api-key", "******"]
    assert sys.orig_argv == ["python", "pagewick", "--api-key=******"]
