"""CudaStream where capturing fails, over stand-ins for PyTorch's functions: what only a GPU could do is not tested."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch

from pagewick.engine import streams
from pagewick.engine.streams import CudaStream

PREVIOUS_ERROR = "operation failed due to a previous error during capture"


class Allocator:
    """PyTorch's allocator, as far as captures concern it. capturing: the pools into which something is being captured.

    num_uses: how many graphs use a pool, the one that is being captured included. current: the streams that became
    current, first to last. ends: whether the driver can end a capture.
    """

    def __init__(self) -> None:
        self.capturing: list[tuple[int, int]] = []
        self.num_uses: dict[tuple[int, int], int] = {}
        self.current = ["usual"]
        self.ends = False

    @contextmanager
    def graph(self, graph: object, *, pool: tuple[int, int], stream: str, capture_error_mode: str) -> Iterator[None]:
        """Begin and end a capture as torch.cuda.graph does: CUDAGraph.cpp tells the allocator last."""
        self.current.append(stream)
        self.capturing.append(pool)
        self.num_uses[pool] = self.num_uses.get(pool, 0) + 1
        try:
            yield
        finally:
            if not self.ends:
                raise RuntimeError(PREVIOUS_ERROR)
            self.capturing.remove(pool)

    def end_allocate(self, device: int, pool: tuple[int, int]) -> None:
        assert device == 0
        if pool not in self.capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.capturing.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert device == 0
        self.num_uses[pool] -= 1
        assert self.num_uses[pool] >= 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    handles, streams = iter(range(1, 9)), iter(range(1, 9))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream {next(streams)}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", made.current.append)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocate)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release)
    return made


def failing_step() -> list[torch.Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_after_a_failed_capture_the_stream_is_the_one_before(allocator: Allocator) -> None:
    with pytest.raises(RuntimeError, match="previous error"):
        CudaStream(torch.device("cuda", 0)).capture(failing_step)
    assert allocator.current == ["usual", "stream 1", "usual"]


def test_graphs_of_two_models_share_no_stream(allocator: Allocator) -> None:
    """Those of one share theirs, and with it memory of cuBLAS, which belongs to the pool that they share as well."""
    one, other = CudaStream(torch.device("cuda", 0)), CudaStream(torch.device("cuda", 0))
    allocator.ends = True
    for stream in (one, other, one):
        stream.capture(list)
    assert allocator.current == ["usual", "stream 1", "stream 2", "stream 1"]
    assert allocator.num_uses == {(0, 1): 2, (0, 2): 1}


def test_after_a_failed_capture_the_allocator_can_free_memory(allocator: Allocator) -> None:
    """While it believes that something is captured, it raises an error instead, and keeps the pool."""
    stream: Any = CudaStream(torch.device("cuda", 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="previous error"):
            stream.capture(failing_step)
        assert not allocator.capturing
    # A pool that nothing uses any more takes no further graph.
    assert allocator.num_uses == {(0, 1): 0, (0, 2): 0}


def test_a_capture_that_ends_is_left_to_its_graph(allocator: Allocator) -> None:
    """The graph releases its pool itself: a second time would take it from the other graphs."""
    allocator.ends = True
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaStream(torch.device("cuda", 0)).capture(failing_step)
    assert not allocator.capturing and allocator.num_uses == {(0, 1): 1}


def test_a_graph_whose_capture_has_failed_stays(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator of pinned memory keeps a pointer to it."""
    made: list[weakref.ref[Graph]] = []

    class Graph:
        def __init__(self) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(streams, "_FAILED", [])
    for allocator.ends in (True, False):
        with suppress(RuntimeError):
            CudaStream(torch.device("cuda", 0)).capture(failing_step if not allocator.ends else list)
    gc.collect()
    assert [graph() is not None for graph in made] == [False, True]


def test_views_are_copied_in_the_graph(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator.ends = True
    capturing: list[int] = []
    contiguous = torch.Tensor.contiguous

    def noted(self: torch.Tensor) -> torch.Tensor:
        capturing.append(len(allocator.capturing))
        return contiguous(self)

    monkeypatch.setattr(torch.Tensor, "contiguous", noted)
    monkeypatch.setattr(streams, "_borrowed", lambda tensor: tensor)
    numbers = torch.arange(6.0).view(2, 3)
    (copied,), _ = CudaStream(torch.device("cuda", 0)).capture(lambda: [numbers.t()])
    assert copied.is_contiguous() and copied.equal(numbers.t()) and capturing == [1]
