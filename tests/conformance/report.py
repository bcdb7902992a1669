"""Runs the conformance suite and writes docs/conformance.md: python -m tests.conformance.report"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conformance.points import POINTS

FOLDER = Path(__file__).parent
DOCUMENT = FOLDER.parents[1] / "docs" / "conformance.md"
PASSED, FAILED = "passes", "fails"

_HEAD = """# Conformance

This page lists the behaviour that clients of OpenAI's and Anthropic's APIs rely on, with the tests that check it: the
current official clients, sync and async, streamed and not, against `pagewick serve` with the built-in model.
`tests/conformance/report.py` runs the suite and writes this page.
"""
_BREAKAGES = """
## Behaviour that broke clients of other servers

Each of these has been reported about some server.

| what clients need | test | result |
|---|---|---|
"""

# Outcome by the file and the name of a test.
Results = Mapping[tuple[str, str], str]


def suite() -> dict[tuple[str, str], str]:
    """Return the docstrings of this folder's tests by file and name."""
    return {(path.name, name): doc for path in sorted(FOLDER.glob("test_*.py")) for name, doc in _tests_in(path)}


def _tests_in(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and re.match(r"test_(point|breakage)_", node.name):
            yield node.name, ast.get_docstring(node) or ""


def render(results: Results) -> str:
    """Return the page's text."""
    found = suite()
    lines = [_HEAD]
    for group, points in POINTS.items():
        lines.append(f"\n## {group}\n\n| point | what | test | result |\n|---|---|---|---|\n")
        for number, what in points.items():
            mine = [test for test in found if test[1].startswith(f"test_point_{number:02}_")]
            lines.append(f"| {number} | {what} | {_names(mine)} | {_result(mine, results)} |\n")
    lines.append(_BREAKAGES)
    for test, doc in found.items():
        if test[1].startswith("test_breakage_"):
            lines.append(f"| {doc.removesuffix('.')} | {_names([test])} | {_result([test], results)} |\n")
    return "".join(lines)


def _names(mine: list[tuple[str, str]]) -> str:
    return ", ".join(f"`{name}`" for _, name in mine)


def _result(mine: list[tuple[str, str]], results: Results) -> str:
    if not mine:
        return "not yet"
    return PASSED if all(results.get(test) == PASSED for test in mine) else FAILED


class Recorder:
    """A pytest plugin that records the outcome of each test; a test fails if any of its cases fails."""

    def __init__(self) -> None:
        self.results: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, name = report.nodeid.partition("::")
        test = (Path(path).name, name.partition("[")[0])
        if report.outcome != "passed":
            self.results[test] = FAILED
        elif report.when == "call":
            self.results.setdefault(test, PASSED)


def main() -> int:
    """Run the suite and write the page, which also names the tests that fail."""
    recorder = Recorder()
    status = pytest.main([str(FOLDER), "--deselect", "tests/conformance/test_report.py"], plugins=[recorder])
    DOCUMENT.write_text(render(recorder.results), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
