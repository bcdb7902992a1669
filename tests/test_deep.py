"""tests/deep.py keeps at least one test for each value of each parameter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import deep

Parameters = dict[str, Any]


class Item(SimpleNamespace):
    """A test as far as tests.deep reads it. It is equal to itself only."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        assert name == "parametrize"
        yield from self.marks


def item(name: str, params: Parameters, *together: str, path: str = "tests/kernels/test_a.py") -> Any:
    marks = [pytest.mark.parametrize(names, []).mark for names in together]
    return Item(nodeid=f"{path}::{name}[{list(params.values())}]", callspec=SimpleNamespace(params=params), marks=marks)


@pytest.fixture(autouse=True)
def usual_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "IS_DEEP", False)


def test_each_value_of_each_parameter_occurs() -> None:
    names, sizes, flags = [f"name {n}" for n in range(5)], range(7), [True, False]
    items = [
        item("test_x", {"name": name, "size": size, "is_new": flag}, "name", "size", "is_new")
        for name, size, flag in product(names, sizes, flags)
    ]
    left_out = deep.repetitions(items)
    kept = [one.callspec.params for one in items if one not in left_out]
    assert 7 <= len(kept) <= 12
    for name, values in (("name", names), ("size", sizes), ("is_new", flags)):
        assert {params[name] for params in kept} == set(values)
    # Every process of a run collects the same tests, in any order.
    assert left_out == deep.repetitions(items[::-1])


def test_the_parameters_of_one_decorator_are_a_single_one() -> None:
    items = [item("test_x", {"a": a, "b": a % 2}, "a, b") for a in range(9)]
    assert deep.repetitions(items) == set()


def test_other_functions_and_folders_do_not_count() -> None:
    grid = [{"a": a, "b": b} for a, b in product("xy", "pq")]
    one, other, elsewhere = (
        [item(name, params, "a", "b", path=path) for params in grid]
        for name, path in (
            ("test_x", "tests/kernels/test_a.py"),
            ("test_y", "tests/kernels/test_a.py"),
            ("test_x", "tests/server/test_a.py"),
        )
    )
    left_out = deep.repetitions([*one, *other, *elsewhere])
    assert 1 <= len(left_out & {*one}) <= 2 and 1 <= len(left_out & {*other}) <= 2
    assert not left_out & {*elsewhere}


def test_a_deep_run_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "IS_DEEP", True)
    assert deep.repetitions([item("test_x", {"a": a, "b": b}, "a", "b") for a, b in product("xyz", "pqr")]) == set()


def test_pytest_collects_the_tests_of_a_deep_run() -> None:
    """Their modules have other parameters then."""
    folder = Path(__file__).parent
    modules = [str(path) for path in folder.rglob("test_*.py") if "DEEP" in path.read_text()]
    assert len(modules) > 20
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider", *modules],
        env={**os.environ, "PAGEWICK_DEEP": "1"}, cwd=folder.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
