"""`pagewick completion`, run by a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from pagewick.cli import cli
from pagewick.cli.completion import complete_model
from pagewick.weights import cached_models

RUN = [sys.executable, "-m", "pagewick"]


def script_for(shell: str) -> str:
    return subprocess.run([*RUN, "completion", shell], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    assert f"_PAGEWICK_COMPLETE={shell}_complete" in script_for(shell)


def completed(tmp_path: Path, words: str, **environment: str) -> list[str]:
    """Return what bash proposes for the last word."""
    program = tmp_path / "pagewick"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from pagewick.cli import main; main()"\n')
    program.chmod(0o755)
    split = words.split(" ")
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(split) - 1}; _pagewick_completion {program}"
    result = subprocess.run(
        ["bash", "-c", f'{script_for("bash")}\n{ask}\necho "${{COMPREPLY[@]}}"'], cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pagewick ser", ["serve"]),
        ("pagewick serve --served", ["--served-model-name"]),
        ("pagewick serve --device c", ["cpu", "cuda"]),
        ("pagewick chat --hub ", ["huggingface", "modelscope"]),
    ],
)
def test_bash_completes_commands_flags_and_values(tmp_path: Path, words: str, expected: list[str]) -> None:
    assert completed(tmp_path, words) == expected


def test_bash_completes_the_models_on_this_disk(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    (tmp_path / "my-notes").mkdir()
    (tmp_path / "my-Q8_0.gguf").touch()
    expected = ["pagewick-demo", "my-model", "my-Q8_0.gguf"]
    for words in ("pagewick serve ", "pagewick chat -m ", "pagewick doctor "):
        assert completed(tmp_path, words, HF_HUB_CACHE=str(tmp_path / "cache")) == expected, words


def test_a_model_of_the_cache_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"Qwen/Qwen3-0.6B": tmp_path, "Qwen/part": None, "unsloth/m:Q8_0": tmp_path / "m-Q8_0.gguf"}
    cached = [SimpleNamespace(model=name, path=path) for name, path in names.items()]
    monkeypatch.setattr(cached_models, "cached_models", lambda environment: cached)
    monkeypatch.chdir(tmp_path)

    def complete(begun: str) -> list[tuple[str, str]]:
        found = complete_model(click.Context(cli), click.Argument(["model"]), begun)
        return [(item.value, item.type) for item in found]

    assert complete("Qw") == [("Qwen/Qwen3-0.6B", "plain")]
    assert complete("uns") == [("unsloth/m:Q8_0", "plain")]
    assert complete("./mod") == [("./mod", "file")]
