"""Docstrings, comments and documents avoid phrases that have to be read twice, and words that we no longer use."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.architecture.source import PACKAGE, ROOT, faults_by_file

MODULES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))

# A sentence that begins so has no subject or hides it: "Of the last byte, in seconds." A question may.
OPENING = re.compile(r"(?:^|[.!?]\s+|\n\n)((?:Of|What|Who|Whose|Whom)\s[^.?!]*[.!?]?)")
DOCSTRING_OPENING = re.compile(r"The same\b")
# These say little, also in messages to users.
EVERYWHERE = re.compile(r"\bso many\b|\bso much as\b|\bwh(?:o|om)ever\b", re.IGNORECASE)
# Drafts are not guesses, and recorded steps are not tapes.
IN_PROSE = re.compile(
    r"\bguess(?:es|ed|ing)?\b|\btapes?\b|\bnot to be\b|\bwhat there is\b|\bknow nothing of\b|\bas it were\b"
    r"|\bto be called (?:once|with)\b|\btold apart\b",
    re.IGNORECASE,
)
NAMES = re.compile(
    r"guess|tape(?!r)|roster|allowance|take_in\b|RowsInFloat32|HeadMatrices|_Unsaid|^Figures$|^Border$|^Effort$|^Endings?$"
)


def faults_of(text: str) -> list[str]:
    """Return the turns of phrase in a text that must go."""
    openings = [match[1] for match in OPENING.finditer(text) if not match[1].endswith("?")]
    phrases = [match[0] for pattern in (EVERYWHERE, IN_PROSE) for match in pattern.finditer(text)]
    return [" ".join(fault.split()) for fault in openings + phrases]


def faults_of_python(source: str) -> list[str]:
    """Return what must go from a module's docstrings, comments, messages and names, with its line."""
    found = [(line, fault) for line, text in comments_of(source) for fault in faults_of(text)]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found += [(node.lineno, f"the name {name}")] if NAMES.search(name) else []
            case ast.Constant(value=str(text)) if match := EVERYWHERE.search(text):
                found.append((node.lineno, match[0]))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            found += [(getattr(node, "lineno", 1), fault) for fault in faults_of(docstring)]
            found += [(getattr(node, "lineno", 1), match[0])] if (match := DOCSTRING_OPENING.match(docstring)) else []
    return [f"line {line}: {fault}" for line, fault in sorted(set(found))]


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yields each comment with its first line; comments in adjacent lines are one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    for start in lines:
        if start - 1 not in lines:
            adjacent = itertools.takewhile(lines.__contains__, itertools.count(start))
            yield start, " ".join(lines[line] for line in adjacent)


def faults_of_markdown(text: str) -> list[str]:
    """Return what must go from a document, code blocks left out. Headings and table rows need not be sentences."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = []
    for part in re.split(r"\n\s*\n|\n(?=[-*|#] ?)", prose):
        is_sentence = not part.lstrip().startswith(("#", "|"))
        words = re.sub(r"^[-*|#\d. ]+", "", part).replace("\n", " ")
        found += faults_of(words if is_sentence else f": {words}")
    return found


def test_modules_speak_plainly() -> None:
    assert faults_by_file(MODULES, lambda path: faults_of_python(path.read_text(encoding="utf-8"))) == {}


def test_documents_speak_plainly() -> None:
    assert faults_by_file(DOCUMENTS, lambda path: faults_of_markdown(path.read_text(encoding="utf-8"))) == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Of the last byte, in seconds."""', ["line 1: Of the last byte, in seconds."]),
        ('def f():\n    """The same for a prompt."""', ["line 1: The same"]),
        ('class A:\n    """Reads. What is read\n    stays."""', ["line 1: What is read stays."]),
        ("x = 1\n# Waits for\n# so many steps.", ["line 2: so many"]),
        ("# A first remark.\ny = 1  # Who asks gets it.", ["line 1: Who asks gets it."]),
        ('raise ValueError("so many are too many")', ["line 1: so many"]),
        ("def take_in(): ...\nclass Roster: ...", ["line 1: the name take_in"]),
        (
            "class HeadMatrices:\n    def guesses(self): ...",
            ["line 1: the name HeadMatrices", "line 2: the name guesses"],
        ),
        ("# Guesses come from a tape.", ["line 1: Guesses", "line 1: tape"]),
        ('"""What is a block? See below. Office whatever."""\n# as many as there are\nguess = "guess"', []),
    ],
)
def test_the_checker_finds_faults_in_modules(source: str, expected: list[str]) -> None:
    assert faults_of_python(source) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Limits\n\n- Who waits is served.\n- A request waits.", ["Who waits is served."]),
        ("One line.\nOf the next\none.", ["Of the next one."]),
        ("A `tape` of so many steps", ["so many", "tape"]),
        ("## What is measured\n| What | why |", []),
        ("```\nWhat is this.\n```\n\nWhat is this? A request.", []),
    ],
)
def test_the_checker_finds_faults_in_documents(text: str, expected: list[str]) -> None:
    assert faults_of_markdown(text) == expected
