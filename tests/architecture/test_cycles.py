"""Modules never import each other in a circle; imports for type checkers and inside functions count as well."""

from __future__ import annotations

import ast
import graphlib

from tests.architecture.source import PACKAGE, nodes_of, tree_of


def imports_of(tree: ast.AST, modules: frozenset[str]) -> set[str]:
    """Return those of `modules` that a syntax tree imports, anywhere in it."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in modules else str(node.module) for full in names.values()}
    return found & modules


def circle_in(trees: dict[str, ast.Module]) -> list[str]:
    """Return modules of which each imports the next, from one module back to itself; empty if there is no circle."""
    graph = {name: sorted(imports_of(tree, frozenset(trees)) - {name}) for name, tree in trees.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # graphlib names a module before those that import it.
        circle: list[str] = error.args[1][::-1]
        return circle
    return []


def package_trees() -> dict[str, ast.Module]:
    """The package's modules by name, without `pagewick` itself, which imports its public names when they are used."""
    trees = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree_of(path)
    del trees[PACKAGE.name]
    return trees


def test_no_modules_import_each_other() -> None:
    assert circle_in(package_trees()) == []


def test_the_checker_finds_a_circle() -> None:
    sources = {
        "p.a": "from p import b",
        "p.b": "def f():\n    import p.c",
        "p.c": "if TYPE_CHECKING:\n    from p.a import thing",
        "p.d": "from p.a import x\nfrom p.d import itself",
    }
    circle = circle_in({name: ast.parse(source) for name, source in sources.items()})
    start = circle.index("p.a")
    assert (circle[:-1] * 2)[start : start + 3] == ["p.a", "p.b", "p.c"]
    assert circle[0] == circle[-1]


def test_the_checker_lets_a_tree_pass() -> None:
    sources = {"p.a": "from p import b, c", "p.b": "import p.c", "p.c": "import json"}
    assert circle_in({name: ast.parse(source) for name, source in sources.items()}) == []
