"""Responses that the server keeps, so that a later request can read them and go on from them.

They are kept in memory, separately for each API key, in the form in which a dialect has encoded them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_RESPONSES = 4096
MAX_TOTAL_BYTES = 256 * 2**20
# A response is forgotten this long after it was last read, even if there is room for it.
RESPONSE_TTL_S = 24 * 3600.0


class ResponseStore(Protocol):
    """The kept responses of a server, in this process or in another one; see StoredResponses for the arguments."""

    async def keep(self, owner: str, response_id: str, body: bytes, item_ids: Sequence[str]) -> None: ...
    async def find(self, owner: str, response_id: str) -> bytes | None: ...
    async def find_by_item(self, owner: str, item_id: str) -> bytes | None: ...
    async def forget(self, owner: str, response_id: str) -> bool: ...


@dataclass(slots=True)
class _Stored:
    body: bytes
    item_ids: Sequence[str]
    used_at: float


class StoredResponses:
    """The kept responses. owner: the only one who can read or forget them.

    If there are too many, or too many bytes, those go that were used longest ago.
    """

    def __init__(self, ttl_s: float = RESPONSE_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._num_bytes = 0
        # The least recently used one comes first.
        self._responses: OrderedDict[tuple[str, str], _Stored] = OrderedDict()
        self._by_item: dict[tuple[str, str], str] = {}

    def keep(self, owner: str, response_id: str, body: bytes, item_ids: Sequence[str]) -> None:
        """Keep an encoded response. item_ids: the names under which `find_by_item` finds it, too."""
        self._drop((owner, response_id))
        self._responses[owner, response_id] = _Stored(body, item_ids, self._clock())
        self._num_bytes += len(body)
        self._by_item |= dict.fromkeys([(owner, item_id) for item_id in item_ids], response_id)
        self._make_room()

    def find(self, owner: str, response_id: str) -> bytes | None:
        """Return a response as it was encoded; None if there is no such response, or not any more."""
        self._forget_old()
        stored = self._responses.get((owner, response_id))
        if stored is None:
            return None
        stored.used_at = self._clock()
        self._responses.move_to_end((owner, response_id))
        return stored.body

    def find_by_item(self, owner: str, item_id: str) -> bytes | None:
        """Return the latest response that was kept with this item; None if there is none."""
        response_id = self._by_item.get((owner, item_id))
        return None if response_id is None else self.find(owner, response_id)

    def forget(self, owner: str, response_id: str) -> bool:
        """Drop a response. Returns whether there was one."""
        self._forget_old()
        return self._drop((owner, response_id))

    def _make_room(self) -> None:
        """The latest response always stays."""
        self._forget_old()
        while len(self._responses) > 1 and (len(self._responses) > MAX_RESPONSES or self._num_bytes > MAX_TOTAL_BYTES):
            self._drop(next(iter(self._responses)))

    def _forget_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._responses and next(iter(self._responses.values())).used_at < oldest:
            self._drop(next(iter(self._responses)))

    def _drop(self, key: tuple[str, str]) -> bool:
        stored = self._responses.pop(key, None)
        if stored is None:
            return False
        owner, response_id = key
        self._num_bytes -= len(stored.body)
        for item_id in stored.item_ids:
            if self._by_item.get((owner, item_id)) == response_id:
                del self._by_item[owner, item_id]
        return True


class LocalResponses:
    """The ResponseStore of a server with one API process."""

    def __init__(self) -> None:
        self._responses = StoredResponses()

    async def keep(self, owner: str, response_id: str, body: bytes, item_ids: Sequence[str]) -> None:
        self._responses.keep(owner, response_id, body, item_ids)

    async def find(self, owner: str, response_id: str) -> bytes | None:
        return self._responses.find(owner, response_id)

    async def find_by_item(self, owner: str, item_id: str) -> bytes | None:
        return self._responses.find_by_item(owner, item_id)

    async def forget(self, owner: str, response_id: str) -> bool:
        return self._responses.forget(owner, response_id)
