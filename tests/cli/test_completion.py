"""`pagewick completion`, run by a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "pagewick"]


def script_for(shell: str) -> str:
    return subprocess.run([*RUN, "completion", shell], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    assert f"_PAGEWICK_COMPLETE={shell}_complete" in script_for(shell)


@pytest.mark.parametrize(
    ("words", "expected"), [("pagewick ser", "serve"), ("pagewick serve --served", "--served-model-name")]
)
def test_bash_completes_commands_and_flags(tmp_path: Path, words: str, expected: str) -> None:
    program = tmp_path / "pagewick"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from pagewick.cli import main; main()"\n')
    program.chmod(0o755)
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _pagewick_completion {program}"
    result = subprocess.run(
        ["bash", "-c", f'{script_for("bash")}\n{ask}\necho "${{COMPREPLY[@]}}"'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.split() == [expected], result.stderr
