"""DeviceStream: the queue of a device that computes beside the host.

PyTorch's operations on tensors of such a device only join its queue. This module has what else a step needs: events,
graphs, and a way to find out whether a computation makes the host wait. mps has such a queue too, but no graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in the queue."""

    def synchronize(self) -> object:
        """Wait until the device has done everything before this place."""
        ...


class Graph(Protocol):
    """Operations that were captured."""

    def replay(self) -> object:
        """Queue the operations again. They read and write the memory that they had when they were captured."""
        ...


class DeviceStream(Protocol):
    """The queue of one device, in which all work of this process stands."""

    def record_event(self) -> Event:
        """Return an event after everything that is queued."""
        ...

    def refuse_waits(self) -> AbstractContextManager[None]:
        """Raise RuntimeError, inside the block, from operations that make the host wait for the device."""
        ...

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Graph]:
        """Call `function` without computing anything; return its results and a graph that computes them.

        All graphs of a stream share their memory: the results are valid until another graph is replayed. The function
        must have run before. Raises RuntimeError if it cannot be captured.
        """
        ...


# Graphs whose capture has failed. PyTorch's allocator of pinned memory has no function to tell it that such a capture
# is over, and goes on asking the graph whether memory belongs to it.
_FAILED: Final[list[object]] = []


class CudaStream:
    """PyTorch's current stream on a GPU of NVIDIA or, with PyTorch for ROCm, of AMD."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._capturing: torch.cuda.Stream | None = None

    def record_event(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # PyTorch warns that it does not notice every wait. The others make capturing fail.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Graph]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # All graphs that are captured in a stream share memory in which cuBLAS works. In PyTorch 2.13, the end of one
        # frees it. In the pool that they share as well, it is still there for the others; if it were in the pool of
        # another model's graphs, it might not be.
        self._capturing = self._capturing or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        try:
            # By default, what any other thread does on the GPU, such as NCCL's watchdog, would end the capture.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"),
            ):
                # A step may return views. Copies of them must be part of the graph.
                results = [result.contiguous() for result in function()]
        except BaseException:
            # If ending the capture fails as well, PyTorch stays on the stream that it captures.
            torch.cuda.set_stream(before)
            _FAILED.append(graph)
            self._end_allocation()
            raise
        return [_borrowed(result) for result in results], graph

    def _end_allocation(self) -> None:
        """Tell PyTorch's allocator that a capture is over: CUDAGraph.capture_end does that last, or not if it fails.

        Until then the allocator frees nothing: an operation for which it must raises an internal error.
        """
        index, pool = self._device.index or 0, self._pool
        self._pool = self._capturing = None
        # Where the capture did end, this raises, and the pool is the graph's to release.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)


def stream_of(device: torch.device) -> DeviceStream | None:
    """Return the stream of a device; None: the device has no events and graphs that Pagewick uses."""
    return CudaStream(device) if device.type == "cuda" else None


class _Memory:
    """The memory of a tensor, for which other programs ask by this attribute; nothing here keeps it allocated."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


def _borrowed(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as one that does not own it, so that later graphs can use the memory, too."""
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
