"""Files and functions stay small enough to be read in one sitting."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

from tests.architecture.source import PACKAGE, PRODUCT, faults_by_file, nodes_of, tree_of

MAX_FILE_LINES = 350
MAX_KERNEL_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_FUNCTION_LINES = 8
MAX_P95_FUNCTION_LINES = 30

KERNELS = PACKAGE / "kernels"
CPP = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cpp", ".h"))
# Our own: the libraries of others are as they are.
PAGES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".html", ".js") and path.parent.name != "vendor")


def lines_too_many(path: Path) -> int:
    limit = MAX_KERNEL_FILE_LINES if path.is_relative_to(KERNELS) else MAX_FILE_LINES
    return max(0, len(path.read_text(encoding="utf-8").splitlines()) - limit)


def test_no_file_is_too_long() -> None:
    assert faults_by_file([*PRODUCT, *CPP, *PAGES], lines_too_many) == {}


def function_lengths(path: Path) -> list[tuple[str, int]]:
    """Return the name and the number of lines of every function of a file."""
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def functions_too_long(path: Path) -> list[tuple[str, int]]:
    return [(name, length) for name, length in function_lengths(path) if length > MAX_FUNCTION_LINES]


def test_no_function_is_too_long() -> None:
    others = [path for path in PRODUCT if not path.is_relative_to(KERNELS)]
    assert faults_by_file(others, functions_too_long) == {}


def test_most_functions_are_short() -> None:
    lengths = sorted(length for path in PACKAGE.rglob("*.py") for _, length in function_lengths(path))
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES
    assert lengths[int(0.95 * len(lengths))] <= MAX_P95_FUNCTION_LINES


def test_the_native_sources_are_checked() -> None:
    assert {path.name for path in CPP} >= {"kernels.h", "ops.cpp"}
