"""Finds the repetitions of tests that run only with PAGEWICK_DEEP=1, and those that a slow machine leaves out.

A test of numerical code with several parameters, such as an instruction set, a dtype and a size, runs for all of their
combinations in a deep run. By default it runs until each value of each parameter has occurred.

On a slow machine, a run with several workers has a share of the cases of each test, so that it ends in time.
PAGEWICK_TEST_SHARE=1 runs them all.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest

IS_DEEP = os.environ.get("PAGEWICK_DEEP") == "1"
FOLDERS = frozenset(
    {"attention", "calibration", "engine", "kernels", "layers", "models", "parallel", "quantization", "weights"}
)
# Each combination of their parameters is a case of its own.
WHOLE = ("tests/models/test_encoders.py",)

# Nanoseconds of one turn of the loop below on a machine that runs all tests in time. The speed of one that other
# programs share differs from time to time.
USUAL_NS: Final = 50.0
# A processor without AVX-512 is an old one, and tests emulate these instructions there.
SHARE_WITHOUT_AVX512: Final = 0.5
LEAST_SHARE: Final = 0.25
# Smaller groups of cases are no samples of each other.
SMALLEST_GROUP: Final = 3
# Minutes each on a slow machine, which leaves them out.
LONGEST: Final = (
    "tests/kernels/test_native_library.py::test_the_kernels_run_on_aarch64",
    "tests/kernels/test_native_library.py::test_the_kernels_run_under_the_sanitizers",
    "tests/kernels/triton/ptx/test_compiled_kernels.py",
    "tests/kernels/triton/test_resources.py::test_variants_compile_within_the_limits[attention]",
)

Value = tuple[str | int, ...]


@functools.cache
def share_of_cases() -> float:
    """Return the share of the cases that a run with several workers has on this machine: 1 unless it is slow."""
    if (given := os.environ.get("PAGEWICK_TEST_SHARE")) is not None:
        return float(given)
    if IS_DEEP:
        return 1.0
    share = min(1.0, (USUAL_NS / _loop_ns()) ** 2) * (SHARE_WITHOUT_AVX512 if _lacks_avx512() else 1.0)
    return max(LEAST_SHARE, share)


def _lacks_avx512() -> bool:
    try:
        found = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return " avx2 " in found and " avx512f " not in found


def _loop_ns(num_turns: int = 200_000) -> float:
    best = math.inf
    for _ in range(7):
        began, total = time.process_time(), 0
        for turn in range(num_turns):
            total += turn * turn
        best = min(best, time.process_time() - began)
    return best / num_turns * 1e9


def beyond_share(items: Sequence[pytest.Item], share: float) -> set[pytest.Item]:
    """Return the tests that a run with this share of the cases leaves out. At least one case of each test is left."""
    if share >= 1:
        return set()
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if item.nodeid.startswith(LONGEST)}
    for group in groups.values():
        if len(group) >= SMALLEST_GROUP:
            # In an order that has nothing to do with the parameters', and differs from test to test.
            group.sort(key=lambda item: crc32(item.nodeid.encode()))
            left_out |= set(group[max(1, round(len(group) * share)) :])
    return left_out


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
