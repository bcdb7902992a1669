"""Until when requests must be finished."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from pagewick.engine.sequence import Request

# Entries of requests that are over may outnumber those that are not by as much, before they are cleared out.
_SLACK = 64


class Deadlines:
    """Deadlines of the requests in `requests`, by id, which is the roster's; entries of others are of no account."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, owner: Request) -> None:
        """Watch a request, if it has a deadline."""
        if owner.deadline is None:
            return
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = [entry for entry in self._heap if self._owner_of(entry) is not None]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (owner.deadline, owner.arrival, owner.request.request_id))

    def take_expired(self, now: float) -> Iterator[Request]:
        """The requests whose time is over; each once."""
        while self._heap and self._heap[0][0] <= now:
            owner = self._owner_of(heapq.heappop(self._heap))
            if owner is not None:
                yield owner

    def _owner_of(self, entry: tuple[float, int, str]) -> Request | None:
        """The request of an entry, unless it is over; another one may have its id by now."""
        _, arrival, request_id = entry
        owner = self._requests.get(request_id)
        return owner if owner is not None and owner.arrival == arrival else None
