"""The table "Who may import whom" of ARCHITECTURE.md holds, and covers everything there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, TRAINING, faults_by_file, nodes_of, tree_of

BASE_MODULES = frozenset({
    "config", "sampling_params", "outputs", "errors", "control_groups", "devices", "log", "expert_routing",
    "huge_memory", "structured_outputs", "child_processes", "number_formats", "other_names", "foreign_names",
    "openmp", "sampling_values", "pooling_params", "option_checks", "lora_request", "server_url",
})  # fmt: skip
EVERYTHING = "everything"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__") or path.parent != PACKAGE)


def read_table(document: str) -> dict[str, frozenset[str]]:
    """Package -> what it may import, from the Markdown table whose second column is headed "may import"."""
    table = document.partition("| package | may import |")[2].partition("\n\n")[0]
    rows: dict[str, frozenset[str]] = {}
    for line in table.splitlines()[2:]:
        packages, allowed, *_ = line.strip("|").split("|")
        names = {EVERYTHING} if allowed.strip() == EVERYTHING else set(re.findall(r"`([\w.]+)`", allowed))
        rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", packages), frozenset(names))
    return rows


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of Pagewick's own, inside functions too, without the leading "pagewick."."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == PACKAGE.name and module:
                yield module, node.lineno


def forbidden_imports(package: str, tree: ast.AST, table: dict[str, frozenset[str]]) -> list[str]:
    """Return the imports of a module of `package` that the table does not allow, with their lines."""
    allowed = BASE_MODULES if package in BASE_MODULES else table[package] | BASE_MODULES | {package, "__version__"}
    if EVERYTHING in allowed:
        return []
    return [
        f"line {line}: {module}"
        for module, line in imported_modules(tree)
        if not any(module == name or module.startswith(f"{name}.") for name in allowed)
    ]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


TABLE = read_table((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))


def test_a_module_imports_only_what_the_table_allows() -> None:
    assert faults_by_file(MODULES, lambda path: forbidden_imports(package_of(path), tree_of(path), TABLE)) == {}


def packages_outside_the_wheel(path: Path) -> set[str]:
    """Return the packages of this repository that a file imports and the wheel does not contain."""
    modules = {
        name.partition(".")[0]
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    return modules & {"benchmarks", "tests", "training"}


def test_the_package_imports_nothing_that_the_wheel_lacks() -> None:
    assert faults_by_file(PACKAGE.rglob("*.py"), packages_outside_the_wheel) == {}


def test_training_uses_nothing_of_the_package_but_what_it_knows_and_the_place_of_the_model() -> None:
    """training/known.py reads the values of facts from the package; a training needs nothing else of it."""
    others = [path for path in TRAINING if path.name != "known.py"]
    allowed = {"demo.MODEL_DIR"}
    found = faults_by_file(others, lambda path: {module for module, _ in imported_modules(tree_of(path))} - allowed)
    assert found == {}


def test_the_table_names_what_there_is() -> None:
    there = {package_of(path) for path in MODULES}
    assert set(TABLE) == there - BASE_MODULES
    entries = frozenset[str]().union(*TABLE.values()) - {EVERYTHING}
    assert {entry.partition(".")[0] for entry in entries} <= there


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\nfrom pagewick.errors import ConfigError", []),
        ("from pagewick.lower import thing\nfrom pagewick.upper.deep import thing", []),
        ("def f():\n    from pagewick.middle import thing", ["line 2: middle.thing"]),
        ("import pagewick.middle", ["line 1: middle"]),
        ("from pagewick import middle", ["line 1: middle"]),
        ("from pagewick.lowermost import thing", ["line 1: lowermost.thing"]),
        ("from pagewick.partly import other, known", ["line 1: partly.other"]),
    ],
)
def test_the_checker_finds_what_is_forbidden(code: str, expected: list[str]) -> None:
    table = read_table("| package | may import |\n|---|---|\n| `upper`, `x` | `lower`, `partly.known` |\n\n| `y` |")
    assert table == {"upper": {"lower", "partly.known"}, "x": {"lower", "partly.known"}}
    assert forbidden_imports("upper", ast.parse(code), table) == expected


def test_base_modules_import_only_each_other() -> None:
    code = ast.parse("from pagewick.config import EngineConfig\nfrom pagewick.engine.messages import Add")
    assert forbidden_imports("errors", code, TABLE) == ["line 2: engine.messages.Add"]
