"""A CopyStream on the CPU that copies late: only when somebody waits for a mark. A race becomes a wrong number."""

from __future__ import annotations

from collections import deque

from torch import Tensor


class LateStream:
    """Copies wait in a queue. num_waits: how often the host has waited."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Tensor, Tensor]] = deque()
        self._num_begun = self._num_done = self.num_waits = 0
        self.num_waits_for_current = 0

    def wait_for_current(self) -> None:
        self.num_waits_for_current += 1

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queue.append((target, source))
        self._num_begun += 1

    def mark(self) -> LateMark:
        return LateMark(self, self._num_begun)

    def run_until(self, number: int) -> None:
        while self._num_done < number:
            target, source = self._queue.popleft()
            target.copy_(source)
            self._num_done += 1


class LateMark:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def wait_on_host(self) -> None:
        self._stream.num_waits += 1
        self._stream.run_until(self._number)

    def wait_on_device(self) -> None:
        self._stream.run_until(self._number)
