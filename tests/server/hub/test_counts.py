"""Counts in shared memory: each process adds to its own, and sees the sum of all."""

from __future__ import annotations

import os

from pagewick.server.hub.counts import CONNECTIONS, TEXT_JOBS, SharedCounts
from pagewick.server.tally import Tally


def test_all_processes_see_the_sum() -> None:
    file = SharedCounts.create_file(3)
    try:
        # Two mappings of the same memory, as in two processes.
        mine, other = SharedCounts(file), SharedCounts(file)
    finally:
        os.close(file)
    first, last = mine.tally(CONNECTIONS, 0), other.tally(CONNECTIONS, 2)
    jobs = other.tally(TEXT_JOBS, 2)
    first.add(5)
    last.add(3)
    last.add(-1)
    jobs.add(4)
    assert (first.total, last.total, jobs.total, mine.tally(TEXT_JOBS, 1).total) == (7, 7, 4, 4)
    mine.clear(2)
    assert (first.total, last.total, jobs.total) == (5, 5, 0)


def test_a_process_alone_counts_for_itself() -> None:
    one, other = Tally(), Tally()
    one.add(2)
    assert (one.total, other.total) == (2, 0)
