"""The processors and the memory that this process may use, with the limits of a container."""

from __future__ import annotations

import psutil
import pytest
import torch

from pagewick import devices
from pagewick.control_groups import GroupLimits
from pagewick.errors import ConfigError

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


@pytest.mark.parametrize(
    ("requested", "num_gpus", "chosen"),
    [
        ("auto", 2, "cuda"), ("auto", 0, "cpu"), ("cuda", 1, "cuda"), ("cuda:1", 2, "cuda:1"), ("cpu", 2, "cpu"),
        ("cuda", 0, None), ("cuda:0", 0, None), ("cuda:2", 2, None), ("cuda:", 2, None), ("mps", 2, None),
    ],
)  # fmt: skip
def test_a_device_must_be_there(
    requested: str, num_gpus: int, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    if chosen is not None:
        assert devices.choose_device(requested) == chosen
        return
    have = "".join(f", cuda:{index}" for index in range(num_gpus))
    with pytest.raises(
        ConfigError, match=f"--device {requested} .* it has: cpu{', cuda' if have else ''}{have}; give"
    ) as said:
        devices.choose_device(requested)
    assert ("pagewick doctor" in str(said.value)) == (requested.startswith("cuda") and not num_gpus)


@pytest.mark.parametrize(("requested", "expected"), [("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cpu", None)])
def test_a_rank_s_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch, requested: str, expected: str | None) -> None:
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    assert str(devices.torch_device(requested, 2)) == (expected or "cpu")
    assert current == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("num_visible", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (2, 1, 1), (4, 3, 3), (8, 3, 3)]
)
def test_a_process_that_sees_one_gpu_takes_it(
    num_visible: int, local_rank: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm shows each task its own GPU, which has index 0 there, if it is told --gpus-per-task 1."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert devices.torch_device("cuda", local_rank) == torch.device("cuda", index)


@pytest.mark.parametrize(("num_visible", "local_rank"), [(2, 2), (2, 3), (3, 7)])
def test_more_ranks_than_gpus_is_an_error(num_visible: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    with pytest.raises(
        ConfigError, match=rf"local rank {local_rank} .* sees {num_visible} GPUs: .*--tensor-parallel-size"
    ):
        devices.torch_device("cuda", local_rank)


def test_ranks_that_share_what_they_see_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks .* need a GPU each, and 1 can be seen: lower --tensor-parallel"):
        devices.check_num_gpus("cuda", 2)
    devices.check_num_gpus("cuda", 1)
    devices.check_num_gpus("cpu", 2)


@pytest.mark.parametrize(("hip", "expected"), [(None, "GPU-7"), ("7.0", "")])
def test_the_identity_of_a_gpu(hip: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "GPU-7"}))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert devices.gpu_uuid(torch.device("cuda", 0)) == expected
    assert devices.gpu_uuid(torch.device("cpu")) == ""


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (2.5, 2), (0.5, 1), (64.0, 4)])
def test_cores_are_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8 if logical else 4)
    monkeypatch.setattr(devices, "read_limits", lambda: GroupLimits(cores=quota))
    assert devices.num_cores() == expected
