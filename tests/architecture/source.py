"""The project's files and their syntax trees, for the tests of this folder."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

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
