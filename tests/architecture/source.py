"""The project's files and their syntax trees, for the tests of this folder."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pagewick"

TRAINING = sorted((ROOT / "training").rglob("*.py"))

# Everything except the tests.
PRODUCT = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py")), *TRAINING, ROOT / "setup.py"]


def name_of(path: Path) -> str:
    """Return the path as it is written in this project's documents."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return a syntax tree's nodes in the order of ast.walk, which takes far longer than most checks of them."""
    return tuple(ast.walk(tree))


def faults_by_file(paths: Iterable[Path], faults_of: Callable[[Path], Any]) -> dict[str, Any]:
    """Return what a check finds, by file. One test of all files takes far less time than one test per file."""
    return {name_of(path): faults for path in paths if (faults := faults_of(path))}
