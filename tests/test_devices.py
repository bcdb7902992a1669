"""The processors and the memory that this process may use, with the limits of a container."""

from __future__ import annotations

import psutil
import pytest
import torch

from pagewick import devices
from pagewick.control_groups import GroupLimits

GIB = 2**30


@pytest.mark.parametrize(
    ("limits", "available", "total"),
    [
        (GroupLimits(), 10 * GIB, 16 * GIB),
        (GroupLimits(memory=4 * GIB, memory_used=GIB), 3 * GIB, 4 * GIB),
        (GroupLimits(memory=4 * GIB, memory_used=5 * GIB), 0, 4 * GIB),
        (GroupLimits(memory=64 * GIB, memory_used=GIB), 10 * GIB, 16 * GIB),
    ],
)
def test_memory_is_what_the_container_leaves(
    monkeypatch: pytest.MonkeyPatch, limits: GroupLimits, available: int, total: int
) -> None:
    machine = type("Memory", (), {"available": 10 * GIB, "total": 16 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", machine)
    monkeypatch.setattr(devices, "read_limits", lambda: limits)
    assert (devices.available_memory("cpu"), devices.total_memory()) == (available, total)


@pytest.mark.parametrize(("requested", "expected"), [("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cpu", None)])
def test_a_rank_s_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch, requested: str, expected: str | None) -> None:
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    assert str(devices.torch_device(requested, 2)) == (expected or "cpu")
    assert current == ([] if expected is None else [expected])


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (2.5, 2), (0.5, 1), (64.0, 4)])
def test_cores_are_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8 if logical else 4)
    monkeypatch.setattr(devices, "read_limits", lambda: GroupLimits(cores=quota))
    assert devices.num_cores() == expected
