"""Room: blocks for sequences, in the order in which they may be found: free ones, then those that sessions keep."""

from __future__ import annotations

from functools import partial

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.scheduling.roster import Roster
from pagewick.engine.sequence import Sequence


class Room:
    """Ends sessions where that helps. The scheduler decides whom to preempt."""

    def __init__(self, roster: Roster, blocks: BlockManager) -> None:
        self._roster = roster
        self._blocks = blocks

    def is_there(self, seq: Sequence, num_cached: int, end: int, victims: list[Sequence]) -> bool:
        """Whether a waiting sequence could go on from `num_cached` to `end` tokens if the victims gave their blocks."""
        can_start = partial(self._blocks.can_start, seq, num_cached, end, victims)
        # A sequence that would run alone gets its blocks whatever the memory: its request was admitted.
        is_alone = len(victims) == len(self._roster.running)
        if not can_start(without_sessions=True) and not (is_alone and can_start(without_sessions=True, by_force=True)):
            return False
        while not can_start():
            if not self._roster.sessions.end_oldest():
                return False
        return True

    def allocate(self, seq: Sequence, num_tokens: int) -> list[list[int]] | None:
        """New blocks per group for a running sequence of `num_tokens` tokens; None if that takes a preemption."""
        while (new_block_ids := self._blocks.allocate(seq, num_tokens)) is None:
            if not self._roster.sessions.end_oldest():
                # A sequence that runs alone gets its blocks whatever the memory: its request was admitted.
                is_alone = len(self._roster.running) == 1
                return self._blocks.allocate(seq, num_tokens, by_force=True) if is_alone else None
        return new_block_ids
