"""Copies to shared memory that run beside the program (cp.async).

Their bytes arrive as late as they may: when the thread waits for them. So a program that reads them too early reads
something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.triton.ptx.values import Array

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads


@dataclass(slots=True)
class _Copy:
    """Values [threads, words] that some threads copy to places. groups: the group of each thread's copy."""

    lanes: Array
    places: Array
    values: Array
    groups: Array


class Copies:
    """The copies that have not arrived yet, and how many groups of copies each thread has ended."""

    def __init__(self, num_lanes: int) -> None:
        self.num_groups = np.zeros(num_lanes, np.int64)
        self.pending: list[_Copy] = []

    def begin(self, lanes: Array, places: Array, values: Array) -> None:
        self.pending.append(_Copy(lanes, places, values, self.num_groups[lanes]))

    def commit(self, lanes: Array) -> None:
        self.num_groups[lanes] += 1

    def wait(self, threads: Threads, lanes: Array, num_left: int) -> None:
        """Let all groups of some threads arrive but the last num_left."""
        is_waiting = np.zeros(len(self.num_groups), np.bool_)
        is_waiting[lanes] = True
        left = []
        for copy in self.pending:
            arrives = is_waiting[copy.lanes] & (copy.groups < self.num_groups[copy.lanes] - num_left)
            if bool(arrives.any()):
                stamps = threads.stamps(copy.lanes[arrives])
                threads.shared.put(copy.places[arrives], copy.values[arrives], stamps)
            if not bool(arrives.all()):
                rest = ~arrives
                left.append(_Copy(copy.lanes[rest], copy.places[rest], copy.values[rest], copy.groups[rest]))
        self.pending = left
