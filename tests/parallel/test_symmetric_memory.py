"""When sums go through symmetric memory: the checks, and the agreement of all ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pagewick.parallel import symmetric_memory
from pagewick.parallel.symmetric_memory import SMALL_BYTES, SmallSums, TorchSharedMemory, open_small_sums

GPU, GROUP = torch.device("cuda", 1), object()


class Memory:
    def __init__(self, error: str = "") -> None:
        self._error = error

    def buffer(self, num_bytes: int, device: torch.device, group: Any) -> torch.Tensor:
        if self._error:
            raise RuntimeError(self._error)
        assert (num_bytes, device, group) == (SMALL_BYTES, GPU, GROUP)
        return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Two ranks on a machine where everything works. others: what the other rank answers, in order."""
    found: dict[str, Any] = {"others": [True, True], "memory": Memory(), "links": True, "capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.get("num_visible", 2))
    caplog.set_level(logging.INFO, logger="pagewick")
    monkeypatch.setattr(symmetric_memory, "TorchSharedMemory", lambda: found["memory"])
    monkeypatch.setattr(symmetric_memory, "_has_nvlink", lambda own, num_ranks: found["links"])
    monkeypatch.setattr(symmetric_memory, "_all_agree", lambda answer, group: found["others"].pop(0) and answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(dist, "get_world_size", lambda group: found.get("size", 2))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    return found


def opened(*, is_single_host: bool = True) -> SmallSums | None:
    group: Any = GROUP
    return open_small_sums(GPU, group, group, is_single_host=is_single_host)


def test_nvlink_and_one_machine(ranks: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert opened() is not None
    assert ranks["others"] == []
    assert [record.getMessage() for record in caplog.records] == ["small sums between ranks: symmetric memory"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"links": False}, "there is no NVLink between all GPUs"),
        ({"size": 16}, "there are more than 8 ranks"),
        ({"num_visible": 1}, "a rank sees 1 of 2 GPUs"),
        ({"capability": (7, 0)}, "the GPU is older than compute capability 8.0"),
        ({"memory": Memory("no fabric\nmore")}, "no fabric"),
        ({"others": [False, False]}, "another rank cannot share memory"),
        ({"others": [True, False]}, "another rank cannot share memory"),
    ],
)
def test_else_nccl_sums_and_one_line_says_why(
    ranks: dict[str, Any], change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks |= change
    assert opened() is None
    assert ranks["others"] == [], "every rank asks the others twice, whatever it found"
    assert [record.getMessage() for record in caplog.records] == [f"small sums between ranks: NCCL ({reason})"]


@pytest.mark.usefixtures("ranks")
def test_several_machines(caplog: pytest.LogCaptureFixture) -> None:
    assert opened(is_single_host=False) is None
    assert "on several machines" in caplog.text


def test_without_gpus_there_is_no_nvlink() -> None:
    assert not symmetric_memory._has_nvlink(0, 2)


def test_the_installed_pytorch_has_the_operation() -> None:
    memory = TorchSharedMemory()
    assert callable(memory._memory.empty) and callable(memory._memory.rendezvous)
    schema = torch.ops.symm_mem.one_shot_all_reduce_out.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name", "out"]
