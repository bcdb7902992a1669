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


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_a_slow_machine_runs_a_share_of_the_cases(share: float) -> None:
    items = [item(name, {"a": a}, "a") for name in ("test_x", "test_y", "test_z") for a in range(20)]
    few = [item("test_few", {"a": a}, "a") for a in range(2)]
    left_out = deep.beyond_share([*items, *few], share)
    kept = [one.callspec.params["a"] for one in items if one not in left_out]
    assert len(kept) == 3 * round(20 * share) and not left_out & set(few)
    # Tests with the same parameters keep different ones, and every process keeps the same.
    assert len(set(kept)) > round(20 * share)
    assert left_out == deep.beyond_share([*few, *items[::-1]], share)


def test_one_case_is_always_left_but_of_the_longest_tests() -> None:
    items = [item("test_x", {"a": a}, "a") for a in range(3)]
    assert len(deep.beyond_share(items, 0.01)) == 2
    assert deep.beyond_share(items, 1.0) == set()
    (path, _, name) = deep.LONGEST[0].partition("::")
    longest: Any = Item(nodeid=f"{path}::{name}")
    assert deep.beyond_share([longest], 0.9) == {longest}


@pytest.mark.parametrize(
    ("nanoseconds", "lacks_avx512", "share"), [(35.0, False, 1.0), (50.0, True, 0.5), (100.0, True, 0.25)]
)
def test_the_share_depends_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, nanoseconds: float, lacks_avx512: bool, share: float
) -> None:
    monkeypatch.delenv("PAGEWICK_TEST_SHARE", raising=False)
    monkeypatch.setattr(deep, "_loop_ns", lambda: nanoseconds)
    monkeypatch.setattr(deep, "_lacks_avx512", lambda: lacks_avx512)
    assert deep.share_of_cases.__wrapped__() == share
    monkeypatch.setenv("PAGEWICK_TEST_SHARE", "0.75")
    assert deep.share_of_cases.__wrapped__() == 0.75
