"""Conversations whose blocks are kept between requests, until their time is over or memory is needed."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.sequence import Sequence

# Sessions beyond this number end the least recently used one.
MAX_SESSIONS = 1024

_Key = tuple[str, str | None, str]


@dataclass(slots=True)
class _Session:
    """pinned: keys of blocks per cache group, those of all choices of the session's last request."""

    arrival: int
    expires_at: float
    pinned: list[set[bytes]]


class SessionStore:
    """ttl_s: how long a session lasts after its last request, in seconds."""

    def __init__(self, blocks: BlockManager, ttl_s: float) -> None:
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._sessions: dict[_Key, _Session] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, seq: Sequence, now: float) -> None:
        """Keep a finished sequence's blocks, which it still holds, if it belongs to a session.

        The blocks of the session's earlier requests are let go; where the conversation went on they are the same.
        """
        options = seq.request.options
        if options.session_id is None:
            return
        # Nobody else's: two users may choose the same name.
        key = (options.session_id, options.cache_salt, options.fairness_key)
        pinned = [set(keys) for keys in self._blocks.pin(seq)]
        before = self._sessions.pop(key, None)
        if before is not None and before.arrival == seq.arrival:
            # What another choice has pinned already is pinned twice now.
            self._blocks.unpin([list(old & new) for old, new in zip(before.pinned, pinned, strict=True)])
            pinned = [old | new for old, new in zip(before.pinned, pinned, strict=True)]
        elif before is not None:
            self._unpin(before)
        self._sessions[key] = _Session(seq.arrival, now + self._ttl_s, pinned)
        if len(self._sessions) > MAX_SESSIONS:
            self.end_oldest()

    def expire(self, now: float) -> None:
        """End the sessions whose time is over."""
        while self._sessions and next(iter(self._sessions.values())).expires_at <= now:
            self.end_oldest()

    def end_oldest(self) -> bool:
        """End the session that was used least recently; false if there is none."""
        if not self._sessions:
            return False
        self._unpin(self._sessions.pop(next(iter(self._sessions))))
        return True

    def _unpin(self, session: _Session) -> None:
        self._blocks.unpin([list(keys) for keys in session.pinned])
