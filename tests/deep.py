"""Finds the repetitions of tests that run only with PAGEWICK_DEEP=1.

A test of numerical code with several parameters, such as an instruction set, a dtype and a size, runs for all of their
combinations in a deep run. By default it runs until each value of each parameter has occurred.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

import pytest

IS_DEEP = os.environ.get("PAGEWICK_DEEP") == "1"
FOLDERS = frozenset(
    {"attention", "calibration", "engine", "kernels", "layers", "models", "parallel", "quantization", "weights"}
)
# Each combination of their parameters is a case of its own.
WHOLE = ("tests/models/test_encoders.py",)

Value = tuple[str | int, ...]


def repetitions(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that a run leaves out unless it is deep."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        path = item.nodeid.partition("::")[0]
        if not IS_DEEP and path.split("/")[1] in FOLDERS and path not in WHOLE:
            groups[item.nodeid.partition("[")[0]].append(item)
    return {item for group in groups.values() for item in _not_needed(group)}


def _not_needed(group: Sequence[pytest.Item]) -> list[pytest.Item]:
    known: set[Value] = set()
    left_out = []
    # In an order that has nothing to do with the parameters', so that early values do not meet again and again.
    for item in sorted(group, key=lambda item: crc32(item.nodeid.encode())):
        values = _values(item)
        if len(values) > 1 and values <= known:
            left_out.append(item)
        known |= values
    return left_out


def _values(item: pytest.Item) -> set[Value]:
    """Return which value each parameter has, by identity. Parameters of one decorator are a single one."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return set()
    found, others = set(), dict(spec.params)
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        if all(name in others for name in names):
            found.add((names[0], *(id(others.pop(name)) for name in names)))
    return found | {(name, id(value)) for name, value in others.items()}
