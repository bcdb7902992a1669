"""An assert has no side effect: `python -O` leaves it out, and must then change nothing but missed mistakes."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import PRODUCT, faults_by_file, nodes_of, tree_of

# Functions without side effects; calls of predicates (is_x, has_x) are allowed as well.
HARMLESS = frozenset({"all", "any", "isinstance", "issubclass", "len", "max", "min", "set", "sorted", "sum"})


def side_effects_in(tree: ast.AST) -> list[str]:
    """Return the expressions within asserts that may have a side effect, with their lines."""
    asserted = [part for node in nodes_of(tree) if isinstance(node, ast.Assert) for part in ast.walk(node.test)]
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in asserted
        if isinstance(node, ast.expr) and _has_side_effect(node)
    ]


def _has_side_effect(node: ast.expr) -> bool:
    match node:
        case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
            return True
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name not in HARMLESS and not name.startswith(("is_", "has_"))
    return isinstance(node, ast.Call)


def test_asserts_have_no_side_effects() -> None:
    assert faults_by_file(PRODUCT, lambda path: side_effects_in(tree_of(path))) == {}


@pytest.mark.parametrize(
    "code",
    [
        "assert token == forced.pop(0)",
        "assert (found := read()) is None or found[next(places)]",
        "assert next(items)",
        "async def f():\n    assert await ready()",
        "assert handlers[0]()",
    ],
)
def test_the_checker_finds_side_effects(code: str) -> None:
    assert side_effects_in(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "assert isinstance(path, str)",
        "assert all(0 <= number < len(memory) for number in numbers), items.pop()",
        "assert disk.is_plain_name(name)",
        "assert 1 <= low <= high",
    ],
)
def test_the_checker_lets_the_rest_pass(code: str) -> None:
    assert side_effects_in(ast.parse(code)) == []
