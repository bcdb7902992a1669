"""The scripts that try other people's clients are complete and documented. To run them takes a package index."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCUMENT = (HERE.parents[1] / "docs/clients.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path for path in HERE.glob("run_*") if path.name != "run_all.sh")
# The package that each script's client is named by.
PACKAGES = {
    "ai_sdk": "ai", "instructor": "instructor", "langchain": "langchain-openai", "litellm": "litellm", "llm": "llm",
    "lm_eval": "lm_eval", "openai_agents": "openai-agents", "openai_node": "openai", "pydantic_ai": "pydantic-ai-slim",
}  # fmt: skip


def name_of(script: Path) -> str:
    return script.stem.removeprefix("run_")


def pinned_python(requirements: Path) -> dict[str, str]:
    """Return the versions in a requirements file. Raises AssertionError for a requirement that is not pinned."""
    versions = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
        assert match is not None, line
        versions[match[1]] = match[2]
    return versions


def pinned_node(requirements: Path) -> dict[str, str]:
    """Return a package.json's versions. Raises AssertionError if the lock file differs from it or names a registry."""
    versions = json.loads((requirements / "package.json").read_text(encoding="utf-8"))["dependencies"]
    lock = json.loads((requirements / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in versions} == versions
    assert not any("resolved" in entry for entry in lock.values())
    return dict(versions)


def test_every_client_has_a_script() -> None:
    assert {name_of(script) for script in SCRIPTS} == PACKAGES.keys()


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_script_can_be_called_and_is_described(script: Path) -> None:
    name = name_of(script)
    assert os.access(script, os.X_OK)
    # Called by itself it calls run_all.sh, which gives it its client and a server.
    assert script.read_text(encoding="utf-8").splitlines()[0].endswith(f"run_all.sh\" {name}'")
    is_python = script.suffix != ".mjs"
    folder = HERE / "requirements"
    versions = pinned_python(folder / f"{name}.txt") if is_python else pinned_node(folder / name)
    package = PACKAGES[name]
    row = next(line for line in DOCUMENT.splitlines() if f"[{script.name}](../tests/clients/{script.name})" in line)
    assert f"| {package} {versions[package]} |" in row


@pytest.mark.parametrize("script", [HERE / "run_all.sh", HERE / "with_server.py"], ids=lambda path: path.name)
def test_the_scripts_that_run_them_can_be_called(script: Path) -> None:
    assert os.access(script, os.X_OK)
