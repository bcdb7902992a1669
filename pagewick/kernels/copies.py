"""CopyStream: copies between host memory and a GPU that run beside computing, and beside the host's own work."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a stream: all copies up to it."""

    def wait_on_host(self) -> None:
        """Return when the copies are done: the host may then change what they read, and read what they wrote."""
        ...

    def wait_on_device(self) -> None:
        """Make operations that are called from now on run after the copies. The host does not wait."""
        ...


class CopyStream(Protocol):
    """Copies in the order of the calls. Host memory must be pinned, or the host waits for a copy."""

    def wait_for_current(self) -> None:
        """Make the next copies run after all operations that have been called so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy; neither tensor may be changed or freed before a later mark has been waited for."""
        ...

    def mark(self) -> Mark: ...


class CudaCopyStream:
    """A CopyStream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream.record_event(), self._stream.device)


class CudaMark:
    """A Mark in a CudaCopyStream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait_on_host(self) -> None:
        self._event.synchronize()

    def wait_on_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
