"""SharedCounts: numbers for which there are limits, in memory that the hub shares with the API processes."""

from __future__ import annotations

import mmap
import os

from pagewick.child_processes import shared_file
from pagewick.server.tally import Tally

CONNECTIONS, TEXT_JOBS = range(2)
_NUM_KINDS = 2
_WORD_BYTES = 8


class SharedCounts:
    """One word for each kind of count and API process, which that process alone writes while it lives.

    file: an open file that `create_file` has made.
    """

    def __init__(self, file: int) -> None:
        num_bytes = os.fstat(file).st_size
        self._num_processes = num_bytes // _NUM_KINDS // _WORD_BYTES
        self._words = memoryview(mmap.mmap(file, num_bytes)).cast("q")

    @staticmethod
    def create_file(num_processes: int) -> int:
        """Return an open file, which processes inherit. Raises OSError."""
        return shared_file("pagewick-counts", num_processes * _NUM_KINDS * _WORD_BYTES)

    def tally(self, kind: int, index: int) -> Tally:
        """Return the tally of a kind of count, as the API process with this index writes it."""
        first = kind * self._num_processes
        return Tally(self._words[first : first + self._num_processes], index)

    def clear(self, index: int) -> None:
        """Set what an API process has counted to 0, because it is gone."""
        for kind in range(_NUM_KINDS):
            self._words[kind * self._num_processes + index] = 0
