"""PartSplitter: tells the parts of an output apart, such as thoughts, text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pagewick.outputs import PartDelta, PartKind

# Either text that was read, and what it is, or what is said in place of text that was read and dropped.
Run = tuple[PartKind, str] | PartDelta


class PartSplitter(Protocol):
    """Reads one choice's output piece by piece.

    marks: token id -> the character that is fed in place of the token's text, for tokens that mean something by
        themselves. A mark is a lone surrogate, which no decoded text has, and belongs to one splitter only.
    kind: of the tokens that were read last, as far as it is known; None while it is open.
    is_over: everything from here on is text, and nothing is held back.
    """

    @property
    def marks(self) -> Mapping[int, str]: ...
    @property
    def kind(self) -> PartKind | None: ...
    @property
    def is_over(self) -> bool: ...

    def feed(self, marked: str) -> Sequence[Run]:
        """What is now known. The texts of the runs that are pairs, joined over all calls, are everything that was fed.

        A tool call is read as DROPPED, and its PartDeltas follow what they were made of.
        """
        ...

    def flush(self) -> Sequence[Run]:
        """What was held back, because no more comes that could belong to it."""
        ...


class Splitting(Protocol):
    """How the answers to one request are split."""

    def splitter(self) -> PartSplitter:
        """A new splitter, for one choice."""
        ...


class ChainedSplitter:
    """Two splitters: what is text for the first one is split by the second."""

    def __init__(self, first: PartSplitter, second: PartSplitter) -> None:
        self._first = first
        self._second = second

    @property
    def marks(self) -> Mapping[int, str]:
        if self._first.is_over:
            return self._second.marks
        return self._first.marks if self._second.is_over else {**self._first.marks, **self._second.marks}

    @property
    def kind(self) -> PartKind | None:
        return self._second.kind if self._first.kind is PartKind.TEXT else self._first.kind

    @property
    def is_over(self) -> bool:
        return self._first.is_over and self._second.is_over

    def feed(self, marked: str) -> Sequence[Run]:
        if self._first.is_over:
            return self._second.feed(marked)
        return self._split(self._first.feed(marked))

    def flush(self) -> Sequence[Run]:
        return [*self._split(self._first.flush()), *self._second.flush()]

    def _split(self, runs: Sequence[Run]) -> list[Run]:
        split: list[Run] = []
        for run in runs:
            if not isinstance(run, PartDelta) and run[0] is PartKind.TEXT:
                split += self._second.feed(run[1])
            else:
                # What the second holds back ends where a part of the first begins.
                split += self._second.flush()
                split.append(run)
        return split


class ChainedSplitting:
    """Several Splittings, each of what is text for those before it; at least one."""

    def __init__(self, splittings: Sequence[Splitting]) -> None:
        self._splittings = splittings

    def splitter(self) -> PartSplitter:
        chain, *more = [one.splitter() for one in self._splittings]
        for splitter in more:
            chain = ChainedSplitter(chain, splitter)
        return chain
