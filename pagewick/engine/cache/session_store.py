"""Conversations whose blocks are kept between requests, until their time is over or running sequences need blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.sequence import Sequence as TokenSequence

# With more sessions than this, the least recently used one ends.
MAX_SESSIONS = 1024

_Key = tuple[str, str | None, str]


@dataclass(slots=True)
class _Session:
    """pinned: keys of blocks per cache group, those of all choices of the session's last request."""

    arrival: int
    expires_at: float
    pinned: list[dict[bytes, None]]


class SessionStore:
    """Owns the sessions, and ends them where a sequence needs their blocks. The scheduler decides whom to preempt.

    A sequence that runs alone gets its blocks whatever the memory: its request was admitted. ttl_s: how long a session
    lasts after its last request, in seconds.
    """

    def __init__(self, blocks: BlockManager, ttl_s: float) -> None:
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._sessions: dict[_Key, _Session] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, seq: TokenSequence, now: float) -> None:
        """Keep a finished sequence's blocks, which it still holds, if it belongs to a session.

        The session's earlier requests release theirs; where the conversation went on they are the same blocks.
        """
        options = seq.request.options
        if options.session_id is None:
            return
        # Two users may choose the same name.
        key = (options.session_id, options.cache_salt, options.fairness_key)
        # Not sets: the order in which blocks are unpinned is the order in which they are evicted.
        pinned = [dict.fromkeys(keys) for keys in self._blocks.pin(seq)]
        before = self._sessions.pop(key, None)
        if before is not None and before.arrival == seq.arrival:
            # Blocks that another choice of this request has pinned are pinned twice now.
            self._blocks.unpin(
                [[key for key in old if key in new] for old, new in zip(before.pinned, pinned, strict=True)]
            )
            pinned = [old | new for old, new in zip(before.pinned, pinned, strict=True)]
        elif before is not None:
            self._unpin(before)
        self._sessions[key] = _Session(seq.arrival, now + self._ttl_s, pinned)
        if len(self._sessions) > MAX_SESSIONS:
            self.end_oldest()

    def expire(self, now: float) -> float | None:
        """End the sessions whose time is over. Returns the seconds until the next one ends; None if there is none."""
        for session in [*self._sessions.values()]:
            if session.expires_at > now:
                return session.expires_at - now
            self.end_oldest()
        return None

    def end_oldest(self) -> bool:
        """End the session that was used least recently; false if there is none."""
        if not self._sessions:
            return False
        self._unpin(self._sessions.pop(next(iter(self._sessions))))
        return True

    def make_room(
        self, seq: TokenSequence, num_cached: int, end: int, victims: Sequence[TokenSequence], *, is_alone: bool
    ) -> bool:
        """Whether a waiting sequence could continue from `num_cached` to `end` tokens with the victims' blocks."""
        can_start = partial(self._blocks.can_start, seq, num_cached, end, victims)
        if not can_start(without_sessions=True) and not (is_alone and can_start(without_sessions=True, by_force=True)):
            return False
        while not can_start():
            if not self.end_oldest():
                return False
        return True

    def allocate(self, seq: TokenSequence, num_tokens: int, *, is_alone: bool) -> list[list[int]] | None:
        """Return new blocks per group for a running sequence of `num_tokens` tokens; None if it takes a preemption."""
        while (new_block_ids := self._blocks.allocate(seq, num_tokens)) is None:
            if not self.end_oldest():
                return self._blocks.allocate(seq, num_tokens, by_force=True) if is_alone else None
        return new_block_ids

    def _unpin(self, session: _Session) -> None:
        self._blocks.unpin([list(keys) for keys in session.pinned])
