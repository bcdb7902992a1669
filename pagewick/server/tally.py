"""Tally: a number with a limit, such as that of open connections, over all API processes of a server."""

from __future__ import annotations


class Tally:
    """Counts in this process, and adds up what all processes count.

    counts: a number for each API process, in memory that they share. Each process writes only its own, at the index
    `own`. None: there is one process.
    """

    def __init__(self, counts: list[int] | memoryview[int] | None = None, own: int = 0) -> None:
        self._counts = [0] if counts is None else counts
        self._own = own

    def add(self, change: int) -> None:
        self._counts[self._own] += change

    @property
    def total(self) -> int:
        return sum(self._counts)
