"""The stand-in, and a GPU with PAGEWICK_TEST_GPU=1, do what the engine expects of a DeviceStream."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewick.engine.device_copies import download, upload
from pagewick.engine.streams import CudaStream, DeviceStream
from tests.engine.graph.late_device import DEVICE, late_device

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


@pytest.fixture
def stream() -> Iterator[DeviceStream]:
    if "PAGEWICK_TEST_GPU" in os.environ:
        with torch.inference_mode():
            yield CudaStream(DEVICE)
        return
    with late_device() as device, torch.inference_mode():
        yield device


def read(stream: DeviceStream, *tensors: Tensor) -> list[list[float]]:
    copies = download(tensors)
    stream.record_event().synchronize()
    return [copy.tolist() for copy in copies]


def test_a_replay_reads_what_is_in_memory_then(stream: DeviceStream) -> None:
    memory, weight = upload([np.arange(4, dtype=np.float32), np.eye(4, dtype=np.float32)], DEVICE)

    def step() -> Sequence[Tensor]:
        # A product, for which a library wants memory of its own, and a view.
        product = (memory[None] + 1.0) @ weight
        return [product.view(4)[1:], product.sum(1)]

    assert read(stream, *step()) == [[2.0, 3.0, 4.0], [10.0]]
    (sentinel,) = upload([np.full(4, 5.0, np.float32)], DEVICE)
    results, graph = stream.capture(step)
    for value in (7.0, -1.0):
        memory.copy_(sentinel * value)
        graph.replay()
        assert read(stream, *results) == [[5 * value + 1] * 3, [20 * value + 4]]


def test_graphs_share_memory_and_each_has_its_own_results(stream: DeviceStream) -> None:
    (memory,) = upload([np.ones(3, np.float32)], DEVICE)
    steps = [lambda factor=factor: [memory * factor, memory + factor] for factor in (2.0, 3.0)]
    for step in steps:
        step()
    captured = [stream.capture(step) for step in steps]
    for number in (1, 0, 0, 1):
        results, graph = captured[number]
        graph.replay()
        assert read(stream, *results) == [[number + 2.0] * 3, [number + 3.0] * 3]


def test_arrays_may_change_as_soon_as_they_are_uploaded(stream: DeviceStream) -> None:
    found, array = [], np.zeros(1000, np.int64)
    for number in range(20):
        array[:] = number
        found.append(upload([array, array[:3]], DEVICE))
    assert [one for pair in found for (one, *_) in read(stream, *pair)] == [n for n in range(20) for _ in range(2)]


def test_a_wait_is_refused(stream: DeviceStream) -> None:
    (memory,) = upload([np.ones(3, np.float32)], DEVICE)
    with stream.refuse_waits():
        memory = memory + 1.0
        with pytest.raises(RuntimeError):
            memory.sum().item()
    assert memory.sum().item() == 6.0


def test_after_a_capture_that_has_failed_everything_else_works(stream: DeviceStream) -> None:
    (memory,) = upload([np.ones(3, np.float32)], DEVICE)

    def waiting() -> Sequence[Tensor]:
        return [memory * memory.sum().item()]

    for _ in range(2):
        assert read(stream, *waiting()) == [[3.0] * 3]
        with pytest.raises(RuntimeError):
            stream.capture(waiting)
        # More memory than is left of what was there before.
        room = [memory.new_zeros(2**20) for _ in range(8)]
        assert read(stream, room[-1][:1] + memory.sum()) == [[3.0]]
        results, graph = stream.capture(lambda: [memory + 1.0])
        graph.replay()
        assert read(stream, *results) == [[2.0] * 3]
