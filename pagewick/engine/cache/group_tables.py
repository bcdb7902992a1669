"""The block tables of one cache group: which blocks a sequence needs for its tokens, and which it releases.

TokenTables have an entry for every block_size tokens; NULL_BLOCK where the sequence has released the block.
StateTables belong to a group of snapshots. The first entry is the block with the state after the computed tokens,
    NULL_BLOCK before the first token. The next ones are for the states after the steps in flight, in their order.

Hashes and tiers are the block manager's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Series
from typing import Final

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.cache.block_pool import BlockPool
from pagewick.engine.sequence import Sequence as TokenSequence

NULL_BLOCK: Final = -1


class RoutineTokens:
    """Tells for which tokens a step of one token changes no block table, which is so for most.

    These tokens repeat with the period of the block sizes. Below a group's lookback, fewer tokens change a table than
    this class says. Chunks have a period of their own, which may be long.
    """

    def __init__(self, groups: Series[CacheSpec]) -> None:
        self._period = math.lcm(*(spec.block_size for spec in groups))
        places = range(self._period)
        self._is_covered = [
            not any(spec.has_snapshots or place % spec.block_size == 0 for spec in groups) for place in places
        ]
        self._changes_blocks = [any(_changes_blocks(spec, place) for spec in groups) for place in places]
        self._chunked = [spec for spec in groups if spec.is_chunked]

    def is_covered(self, start: int) -> bool:
        """Whether a sequence that has the blocks of the token at `start` - 1 has those of the token at `start`."""
        return self._is_covered[start % self._period]

    def changes_blocks(self, num_tokens: int) -> bool:
        """Whether the last of `num_tokens` computed tokens may complete a block, or end the need for one."""
        return self._changes_blocks[num_tokens % self._period] or any(
            spec.first_block(num_tokens - 1) != spec.first_block(num_tokens) for spec in self._chunked
        )


def _changes_blocks(spec: CacheSpec, place: int) -> bool:
    if spec.is_chunked:
        return len(spec.completed_blocks(place + spec.block_size - 1, place + spec.block_size)) > 0
    # Far enough from the first token that blocks are released.
    after = place + (2 + (spec.lookback or 0) // spec.block_size) * spec.block_size
    return len(spec.completed_blocks(after - 1, after)) > 0 or spec.first_block(after - 1) != spec.first_block(after)


class TokenTables:
    """Tables of blocks that hold the keys and values of block_size tokens each."""

    def __init__(self, spec: CacheSpec, pool: BlockPool) -> None:
        self._spec = spec
        self._block_size = spec.block_size
        self._pool = pool

    def begin(self, num_cached: int, prefix: list[int]) -> list[int]:
        """Return the table of a sequence that continues after `num_cached` tokens, whose blocks are in `prefix`."""
        return [NULL_BLOCK] * self._spec.first_block(num_cached) + prefix

    def num_to_start(self, num_all_tokens: int, num_cached: int, num_tokens: int) -> int:
        """Return how many blocks besides the prefix's a start needs that computes up to `num_tokens` tokens.

        A group that keeps every token must have room for all `num_all_tokens` tokens of the sequence.
        """
        spec = self._spec
        return spec.num_blocks(num_all_tokens if spec.lookback is None else num_tokens) - num_cached // spec.block_size

    def num_lacking(self, seq: TokenSequence, table: list[int], num_tokens: int, *, for_drafts: bool) -> int:
        """Return how many more blocks the sequence's next step needs, up to `num_tokens` tokens.

        for_drafts: the step has been planned, and gets draft tokens.
        """
        # Called in every step, so this repeats the arithmetic of CacheSpec.num_blocks without the call.
        number = -(-num_tokens // self._block_size) - len(table)
        return number if number > 0 else 0

    def extend(self, seq: TokenSequence, table: list[int], number: int, *, for_drafts: bool) -> list[int]:
        """Add `number` new blocks for the sequence's next step; return this group's SlotWork.new_block_ids."""
        new = [self._pool.acquire() for _ in range(number)]
        table += new
        return new

    def completed(self, table: list[int], before: int, after: int) -> Iterator[tuple[int, int]]:
        """Yield (index, block) of each block that a step from `before` to `after` computed tokens completes."""
        for index in self._spec.completed_blocks(before, after):
            yield index, table[index]

    def release_unneeded(self, table: list[int], before: int, after: int) -> None:
        """Release the blocks that no token after that step looks back at."""
        for index in range(self._spec.first_block(before), self._spec.first_block(after)):
            self._pool.release(table[index])
            table[index] = NULL_BLOCK

    def is_copied(self, num_tokens: int) -> bool:
        """Whether a fork that takes over `num_tokens` tokens needs a copy of the last block."""
        return num_tokens % self._spec.block_size > 0

    def has_all(self, table: list[int], num_tokens: int) -> bool:
        """Whether the table still has all blocks needed to continue after `num_tokens` tokens."""
        return NULL_BLOCK not in table[self._spec.first_block(num_tokens) : self._spec.num_blocks(num_tokens)]

    def fork(self, table: list[int], num_tokens: int) -> tuple[list[int], int | None]:
        """Return a child's table for `num_tokens` tokens, and the block to copy into its last one, if any."""
        first, last = self._spec.first_block(num_tokens), num_tokens // self._spec.block_size
        shared = table[first:last]
        for block_id in shared:
            self._pool.share(block_id)
        child = [NULL_BLOCK] * first + shared
        if not self.is_copied(num_tokens):
            return child, None
        child.append(self._pool.acquire())
        return child, table[last]

    def problems(self, table: list[int], num_computed_tokens: int) -> Iterable[str]:
        """Yield contradictions in a table."""
        if len(table) < self._spec.num_blocks(num_computed_tokens):
            yield "a sequence has tokens without blocks"


class StateTables:
    """Tables of blocks that hold one state each.

    A step that begins at a multiple of block_size tokens writes its state to another block, because the one that it
    continues from is a snapshot, or will be when the step before it is done. Any other step overwrites its block. No
    state is stored behind draft tokens, which may be rejected.

    keeps_snapshots: false where no other sequence can use them.
    """

    def __init__(self, spec: CacheSpec, pool: BlockPool, *, keeps_snapshots: bool) -> None:
        self._spec = spec
        self._pool = pool
        self._keeps_snapshots = keeps_snapshots

    def begin(self, num_cached: int, prefix: list[int]) -> list[int]:
        return prefix or [NULL_BLOCK]

    def num_to_start(self, num_all_tokens: int, num_cached: int, num_tokens: int) -> int:
        return 1

    def num_lacking(self, seq: TokenSequence, table: list[int], num_tokens: int, *, for_drafts: bool) -> int:
        if for_drafts or not self._moves(seq.num_scheduled_tokens):
            return 0
        # A step that was planned but not done has left a block.
        has_spare = len(table) == 2 and seq.num_tokens_in_flight == 0
        return int(not has_spare)

    def extend(self, seq: TokenSequence, table: list[int], number: int, *, for_drafts: bool) -> list[int]:
        if for_drafts:
            return []
        table += [self._pool.acquire() for _ in range(number)]
        return [table[-2 if self._moves(seq.num_scheduled_tokens) else -1], table[-1]]

    def completed(self, table: list[int], before: int, after: int) -> Iterator[tuple[int, int]]:
        for index in self._spec.completed_blocks(before, after):
            yield index, table[1 if self._moves(before) else 0]

    def release_unneeded(self, table: list[int], before: int, after: int) -> None:
        if self._moves(before):
            if table[0] != NULL_BLOCK:
                self._pool.release(table[0])
            del table[0]

    def is_copied(self, num_tokens: int) -> bool:
        return not self._moves(num_tokens)

    def has_all(self, table: list[int], num_tokens: int) -> bool:
        return table[0] != NULL_BLOCK

    def fork(self, table: list[int], num_tokens: int) -> tuple[list[int], int | None]:
        if self.is_copied(num_tokens):
            return [self._pool.acquire()], table[0]
        self._pool.share(table[0])
        return [table[0]], None

    def problems(self, table: list[int], num_computed_tokens: int) -> Iterable[str]:
        if not table or (table[0] == NULL_BLOCK) != (num_computed_tokens == 0):
            yield "a sequence has no state, or one before its first token"

    def _moves(self, start: int) -> bool:
        """Whether a step that begins at `start` writes its state to another block."""
        return start == 0 or (self._keeps_snapshots and start % self._spec.block_size == 0)
