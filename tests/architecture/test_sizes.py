"""Files and functions stay small enough to be read in one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, PRODUCT, name_of, tree_of

MAX_FILE_LINES = 350
MAX_KERNEL_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

KERNELS = PACKAGE / "kernels"
CPP = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cpp", ".h"))
# Our own: the libraries of others are as they are.
PAGES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".html", ".js") and path.parent.name != "vendor")


@pytest.mark.parametrize("path", [*PRODUCT, *CPP, *PAGES], ids=name_of)
def test_no_file_is_too_long(path: Path) -> None:
    limit = MAX_KERNEL_FILE_LINES if path.is_relative_to(KERNELS) else MAX_FILE_LINES
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", [path for path in PRODUCT if not path.is_relative_to(KERNELS)], ids=name_of)
def test_no_function_is_too_long(path: Path) -> None:
    too_long = {
        node.name: size
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_the_native_sources_are_checked() -> None:
    assert {path.name for path in CPP} >= {"kernels.h", "ops.cpp"}
