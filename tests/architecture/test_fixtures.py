"""The shared fixtures of tests/conftest.py and the distribution of tests work as described."""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.assertion import rewrite
from torch.utils import _device

from tests import distribution
from tests.architecture.source import ROOT
from tests.conftest import MAX_POISONED_BYTES, poison_allocations, poisoned
from tests.distribution import LongestUnitsFirst, rank_of, unit_of
from tests.rewriting import rewrite_share


def call(allocate, *args, **kwargs):  # type: ignore[no-untyped-def]
    return allocate(*args, **kwargs)


in_the_package = FunctionType(call.__code__, {"__name__": "pagewick.kernels.reference"})
in_a_library = FunctionType(call.__code__, {"__name__": "torch.nn.functional"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_package_gets_uninitialised_memory_full_of_nan(dtype: torch.dtype) -> None:
    assert in_the_package(poisoned(torch.empty), 3, dtype=dtype).isnan().all()
    assert in_the_package(poisoned(torch.empty), 8, dtype=torch.uint8).view(dtype).isnan().all()
    assert in_the_package(poisoned(torch.empty_like), torch.zeros(3, dtype=dtype)).isnan().all()


def test_other_callers_and_large_or_other_tensors_are_not_filled() -> None:
    zeros = poisoned(torch.zeros)
    assert not in_a_library(zeros, 3).any()
    assert not in_the_package(zeros, 3, dtype=torch.int64).any()
    assert not in_the_package(zeros, MAX_POISONED_BYTES // 4 + 1).any()
    assert in_the_package(poisoned(torch.empty), 3, device="meta").shape == (3,)


def test_tensors_on_the_meta_device_take_no_memory_during_and_after_the_patch() -> None:
    _device._device_constructors.cache_clear()  # as in a process whose first test it is
    with pytest.MonkeyPatch.context() as patch:
        poison_allocations(patch)
        with torch.device("meta"):
            assert torch.empty(3).is_meta
    with torch.device("meta"):
        assert torch.empty(3).is_meta


@pytest.mark.parametrize(
    ("node_id", "unit"),
    [
        ("tests/test_log.py::TestLog::test_it[a]", "tests/test_log.py"),
        ("tests/page/test_access.py::test_it", "tests/page/"),
        (
            "tests/models/test_against_transformers.py::test_alone[phi-3]",
            "tests/models/test_against_transformers.py[phi-3]",
        ),
        ("tests/models/test_against_transformers.py::test_files", "tests/models/test_against_transformers.py"),
        ("tests/kernels/test_native_library.py::test_it[a]", "tests/kernels/test_native_library.py::test_it[a]"),
    ],
)
def test_tests_that_share_a_costly_fixture_run_in_one_worker(node_id: str, unit: str) -> None:
    assert unit_of(node_id) == unit


def test_the_slowest_units_exist_and_come_first() -> None:
    listed = (
        *distribution.FOLDERS,
        *distribution.FILES_BY_PARAMETER,
        *distribution.FILES_BY_TEST,
        *distribution.SLOWEST,
    )
    for path, _, name in (unit.partition("::") for unit in listed):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in Path(ROOT / path).read_text(encoding="utf-8"), name
    assert rank_of(f"{distribution.SLOWEST[0]}[x]") == 0
    assert rank_of("tests/test_log.py::test_it") == len(distribution.SLOWEST)


class Worker:
    """Takes tests as a worker of xdist does."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.waiting: list[int] = []

    def send_runtest_some(self, places: list[int]) -> None:
        self.waiting += places

    def shutdown(self) -> None:
        self.shutting_down = True


def test_each_test_runs_once_and_a_unit_in_one_worker(pytestconfig: pytest.Config) -> None:
    sizes = {"a": 5, "b": 1, "c": 3, "d": 7}
    units = [[f"tests/test_{name}.py::test[{number}]" for number in range(size)] for name, size in sizes.items()]
    node_ids = [node_id for unit in units for node_id in unit]
    config = copy.copy(pytestconfig)
    config.option = argparse.Namespace(**{**vars(config.option), "tx": ["2*popen"], "maxschedchunk": None})
    scheduler = LongestUnitsFirst(config, None)
    workers: Any = [Worker("gw0"), Worker("gw1")]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, node_ids)
    scheduler.schedule()
    ran: dict[Worker, list[str]] = {worker: [] for worker in workers}
    while not scheduler.tests_finished or any(worker.waiting for worker in workers):
        for worker in workers:
            if worker.waiting:
                place = worker.waiting.pop(0)
                ran[worker].append(node_ids[place])
                scheduler.mark_test_complete(worker, place)
    first, second = ran.values()
    assert sorted(first + second) == node_ids
    for unit in units:
        where = first if unit[0] in first else second
        start = where.index(unit[0])
        assert where[start : start + len(unit)] == unit
    assert not scheduler.has_pending and all(worker.shutting_down for worker in workers)


def test_each_worker_rewrites_its_share(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name, text in (("test_a", "assert x"), ("test_b", "assert ("), ("test_c", "x = 1"), ("other", "assert y")):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    def rewritten() -> list[str]:
        kept = {path: rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}" for path in tmp_path.glob("*.py")}
        return sorted(path.stem for path in kept if rewrite._read_pyc(path, kept[path]) is not None)

    rewrite_share(pytestconfig, tmp_path, worker=1, num_workers=2)
    assert rewritten() == []
    rewrite_share(pytestconfig, tmp_path, worker=0, num_workers=2)
    assert rewritten() == ["test_a", "test_c"]
