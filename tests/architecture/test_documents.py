"""Every path, make target, command and flag that the documents name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from pagewick.cli import COMMANDS, cli
from tests.architecture.source import PACKAGE, ROOT, name_of

DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += [ROOT / "training" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

# A word in backticks that names a file: it has a slash, or an ending that this project uses.
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
# Files of models with such an ending.
OTHER_FILES = {"vocab.txt"}
ENDINGS = (".py", ".md", ".toml", ".txt", ".cpp", ".h", ".in", ".yml")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def code_spans(text: str) -> list[str]:
    """Return the inline code of a Markdown text, without its code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def shell_lines(text: str) -> list[str]:
    """Return the lines of a text's shell blocks and each piece of inline code, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()] + code_spans(text)
    return [line.partition(" #")[0] for line in lines]


def flags_of(command_name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), command_name)
    assert command is not None
    commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
    params = [parameter for one in commands for parameter in one.params]
    return {name for parameter in params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def missing_paths(text: str, folders: list[Path]) -> list[str]:
    """Return the paths in backticks and the targets of relative links that are in none of the folders."""
    mentioned = [span for span in code_spans(text) if PATH.fullmatch(span) and ("/" in span or span.endswith(ENDINGS))]
    mentioned = [span for span in mentioned if not span.startswith("/") and not re.fullmatch(r"[A-Z]\w*/[\w.-]+", span)]
    mentioned += [link.partition("#")[0] for link in re.findall(r"\]\(([^)#:\s][^):\s]*)\)", text)]
    mentioned = [path for path in mentioned if path not in OTHER_FILES]
    return [path for path in mentioned if not any((folder / path).exists() for folder in folders)]


@each_document
def test_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert missing_paths(text, [ROOT, PACKAGE, document.parent]) == []


@each_document
def test_make_targets_exist(document: Path) -> None:
    lines = shell_lines(document.read_text(encoding="utf-8"))
    named = {target for line in lines for target in re.findall(r"(?:^|=\S+ )make ([a-z-]+)", line)}
    assert named <= MAKE_TARGETS


@each_document
def test_commands_and_flags_exist(document: Path) -> None:
    for line in shell_lines(document.read_text(encoding="utf-8")):
        called = re.search(r"(?:^|/)pagewick ([a-z-]+)(.*)", line)
        if called is not None:
            assert called[1] in COMMANDS, line
            flags = re.findall(r"(?<!\S)--?[a-z][\w-]*", re.sub(r'"[^"]*"', "", called[2]))
            assert set(flags) <= flags_of(called[1]), line
        elif re.fullmatch(r"--[a-z-]+", line):
            assert any(line in flags_of(name) for name in COMMANDS), line


def test_the_page_on_the_api_names_every_code_of_an_error() -> None:
    files = [*(PACKAGE / "server").rglob("*.py"), PACKAGE / "errors.py"]
    codes = {code for file in files for code in re.findall(r'\bcode="([a-z_]+)"', file.read_text(encoding="utf-8"))}
    assert len(codes) > 20
    document = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(code for code in codes if f"`{code}`" not in document) == []


def test_every_make_target_is_phony_and_explained() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert phony == explained == MAKE_TARGETS


def test_every_requirement_is_pinned_for_development() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if "==" in line}
    assert {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted} <= pinned  # type: ignore[index]
    assert not [line for line in lines if line and not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]


def normal(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`engine/engine.py` and `pagewick/config.py`", []),
        ("`engine/gone.py`", ["engine/gone.py"]),
        ("`gone.md`", ["gone.md"]),
        ("[a](README.md) [b](gone.md#part) [c](https://example.org/x)", ["gone.md"]),
        ("`Qwen/Qwen3-0.6B` and `/v1/models` and `a/b c`", []),
        ("```\n`engine/gone.py`\n```", []),
    ],
)
def test_the_checker_finds_missing_paths(text: str, expected: list[str]) -> None:
    assert missing_paths(text, [ROOT, PACKAGE]) == expected
