"""LazyHeap: a queue ordered by rank from which an item may be removed wherever it stands."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item", bound=Hashable)

# Removed entries are dropped all at once when they are more than this and more than those that are left.
_MAX_REMOVED = 64


class LazyHeap(Generic[_Item]):
    """Adding, removing and finding the first item take logarithmic time; `item in heap` takes constant time.

    A removed entry stays in the heap until it comes to the front, or there are too many of them.
    """

    def __init__(self) -> None:
        # Rank, number of the entry, item. Numbers are unique, so that items are never compared.
        self._entries: list[tuple[Any, int, _Item]] = []
        self._number_of: dict[_Item, int] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._number_of)

    def __contains__(self, item: _Item) -> bool:
        return item in self._number_of

    def add(self, item: _Item, rank: Any) -> None:
        """Add an item that is not there. The rank must not change while it is there."""
        self._num_added += 1
        self._number_of[item] = self._num_added
        heappush(self._entries, (rank, self._num_added, item))

    def remove(self, item: _Item) -> None:
        del self._number_of[item]
        if len(self._entries) > 2 * len(self._number_of) + _MAX_REMOVED:
            self._entries = [entry for entry in self._entries if self._is_current(entry)]
            heapify(self._entries)

    def first(self) -> _Item | None:
        """Return the item of lowest rank."""
        entries = self._entries
        while entries and not self._is_current(entries[0]):
            heappop(entries)
        return entries[0][2] if entries else None

    def _is_current(self, entry: tuple[Any, int, _Item]) -> bool:
        return self._number_of.get(entry[2]) == entry[1]
