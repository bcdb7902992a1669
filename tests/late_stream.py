"""A CopyStream on the CPU that copies late: only when somebody waits for a mark. A race becomes a wrong number.

A device that waits lets the host do nothing: the host may change what a copy reads only once it has waited itself.
What it changes before is noticed at the next call, with an AssertionError.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class LateStream:
    """Copies wait in a queue. num_waits: how often the host has waited."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Tensor, Tensor]] = deque()
        self._num_begun = self._num_done = self.num_waits = 0
        self.num_waits_for_current = 0
        # Sources of copies for which the host has not waited: the number of the copy, the tensor, and its contents.
        self._held: list[tuple[int, Tensor, Tensor]] = []

    def wait_for_current(self) -> None:
        self._check()
        self.num_waits_for_current += 1

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._check()
        self._queue.append((target, source))
        self._num_begun += 1

    def mark(self) -> LateMark:
        return LateMark(self, self._num_begun)

    def run_until(self, number: int, *, is_host: bool) -> None:
        self._check()
        while self._num_done < number:
            target, source = self._queue.popleft()
            target.copy_(source)
            self._num_done += 1
            # Copies of the stream itself come in their order.
            self._held = [
                each for each in self._held if not _overlap(each[1], target) and not _overlap(each[1], source)
            ]
            self._held.append((self._num_done, source, source.clone()))
        if is_host:
            self._held = [each for each in self._held if each[0] > number]

    def _check(self) -> None:
        for _, source, before in self._held:
            same = torch.equal(source.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))
            assert same, "the host has changed what a copy may still read"


class LateMark:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def wait_on_host(self) -> None:
        self._stream.num_waits += 1
        self._stream.run_until(self._number, is_host=True)

    def wait_on_device(self) -> None:
        self._stream.run_until(self._number, is_host=False)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    begins = one.data_ptr(), other.data_ptr()
    return begins[0] < begins[1] + other.nbytes and begins[1] < begins[0] + one.nbytes
