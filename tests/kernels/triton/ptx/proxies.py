"""Writes to shared memory that products of a warpgroup may not see yet: those that no proxy fence follows.

PTX has two paths to memory. Threads, and their copies by cp.async, use the generic proxy; wgmma.mma_async reads by the
async proxy. A fence.proxy.async must come between them: of the thread that wrote, before a barrier, or of all threads
that begin the product, after it.

Time is a number that grows at each fence and each product.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.triton.ptx.values import Array

_NEVER = -1


class Proxies:
    """When each unit of shared memory was last written, and when each thread was last at a fence."""

    def __init__(self, num_units: int, num_lanes: int) -> None:
        self._time = 0
        self._written = np.full(num_units, _NEVER, np.int64)
        self._fenced, self._fenced_before_barrier = np.full((2, num_lanes), _NEVER, np.int64)

    def note_write(self, units: Array) -> None:
        self._written[units] = self._time

    def fence(self, lanes: Array) -> None:
        self._fenced[lanes] = self._time
        self._time += 1

    def pass_barrier(self, lanes: Array) -> None:
        self._fenced_before_barrier[lanes] = self._fenced[lanes]

    def now(self) -> int:
        """Return a time. Whatever is written from here on is written after it."""
        self._time += 1
        return self._time - 1

    def is_unfenced(self, units: Array, writers: Array, readers: Array) -> Array:
        """Return which units [readers, units] threads have written without a fence. readers: [readers, threads]."""
        written = self._written[units]
        by_readers = self._fenced[readers].min(axis=1, keepdims=True)
        found: Array = (self._fenced_before_barrier[writers] < written) & (by_readers < written)
        return found

    def is_written_since(self, units: Array, time: int) -> Array:
        found: Array = self._written[units] > time
        return found
