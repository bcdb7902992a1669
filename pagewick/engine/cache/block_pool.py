"""BlockPool: the state of the blocks of one cache group, by number. No tensors here.

A block is at any time in one of three states:

    free        no sequence holds it and its content is not worth keeping
    cached      no sequence holds it, but its content can serve a prefix hit; it is reused last, least recently used
                first, and not at all while a session keeps it
    referenced  held by one sequence, or by several with the same prefix

and free + cached + referenced == num_open. The pool opens more blocks, up to num_blocks, before it evicts any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

OnEvict = Callable[[int, bytes], None]


class BlockPool:
    """num_blocks: the upper limit. grow: maps the number of further blocks wanted to the number that may be opened now;
    None opens all blocks at once. on_evict: called with a cached block and its hash before its content is given up.
    """

    def __init__(
        self, num_blocks: int, *, grow: Callable[[int], int] | None = None, on_evict: OnEvict | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.num_open = num_blocks if grow is None else 0
        self._grow = grow
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._freed: list[int] = []
        self._num_touched = 0  # blocks from here on were never used, and their memory is not committed yet
        self._cached: dict[int, None] = {}  # can be evicted; least recently used first
        self._kept: dict[int, None] = {}  # cached, too, but a session wants them
        self._pins: Counter[bytes] = Counter()  # number of sessions that want the block with this hash

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_open - self._num_touched

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_available(self) -> int:
        return self.num_free + len(self._cached)

    def num_holders(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    @property
    def num_referenced(self) -> int:
        return self.num_open - self.num_free - self.num_cached

    def has_room(self, num_wanted: int, *, by_force: bool = False) -> bool:
        """Whether `num_wanted` blocks could be acquired now; opens more if there are too few.

        by_force: open blocks up to num_blocks, whatever `grow` says.
        """
        missing = num_wanted - self.num_available
        if missing > 0:
            self._open(missing, by_force=by_force)
        return num_wanted <= self.num_available

    def acquire(self) -> int:
        """Return a block for new content: a freed one, else one never used, else the least recently used cached one."""
        if not self.num_free:
            self._open(1)
        if self._freed:
            block_id = self._freed.pop()
        elif self._num_touched < self.num_open:
            block_id = self._num_touched
            self._num_touched += 1
        else:
            block_id = self._evict()
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a holder to a block."""
        self._cached.pop(block_id, None)
        self._kept.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Remove a holder from a block."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if block_id not in self._hash_of:
                self._freed.append(block_id)
            elif self.is_pinned(block_id):
                self._kept[block_id] = None
            else:
                self._cached[block_id] = None

    def is_pinned(self, block_id: int) -> bool:
        return self._hash_of.get(block_id) in self._pins

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._cached

    def is_kept(self, block_id: int) -> bool:
        return block_id in self._kept

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Let a complete block serve prefix hits, unless another block with this hash does; whether it is new."""
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def unregister(self, block_hash: bytes) -> None:
        """Keep the block with this hash, if there is one, from serving prefix hits."""
        block_id = self._block_of.pop(block_hash, None)
        if block_id is None:
            return
        del self._hash_of[block_id]
        if block_id in self._cached or block_id in self._kept:
            self._cached.pop(block_id, None)
            self._kept.pop(block_id, None)
            self._freed.append(block_id)

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def pin(self, block_hash: bytes) -> None:
        """Keep the block with this hash, now or later, from eviction until it is unpinned as often as it was pinned."""
        self._pins[block_hash] += 1
        block_id = self._block_of.get(block_hash)
        if block_id in self._cached:
            del self._cached[block_id]
            self._kept[block_id] = None

    def unpin(self, block_hash: bytes) -> None:
        """Remove one pin; the block may be gone."""
        self._pins[block_hash] -= 1
        if self._pins[block_hash]:
            return
        del self._pins[block_hash]
        block_id = self._block_of.get(block_hash)
        if block_id in self._kept:
            del self._kept[block_id]
            self._cached[block_id] = None

    def cached_blocks(self) -> list[tuple[int, bytes]]:
        """Return every block with a hash, in the order in which they would be evicted."""
        unreferenced = [*self._cached, *self._kept]
        others = self._hash_of.keys() - set(unreferenced)
        return [(block_id, self._hash_of[block_id]) for block_id in [*unreferenced, *sorted(others)]]

    def problems(self, held: Counter[int]) -> Iterable[str]:
        """Yield contradictions to the invariants, given the number of sequences that hold each block."""
        freed = Counter(self._freed)
        for block_id, count in enumerate(self._ref_counts):
            if count != held[block_id]:
                yield f"block {block_id} has {count} references and {held[block_id]} holders"
            states = (count > 0) + (block_id in self._cached) + (block_id in self._kept) + freed[block_id]
            if states + (block_id >= self._num_touched) != 1:
                yield f"block {block_id} is not in exactly one state"
        if not self._num_touched <= self.num_open <= self.num_blocks:
            yield f"{self._num_touched} blocks are used, {self.num_open} open, {self.num_blocks} there"
        if {block: hash_ for hash_, block in self._block_of.items()} != self._hash_of:
            yield "hashes and blocks do not map onto each other"
        if not {*self._cached, *self._kept} <= self._hash_of.keys():
            yield "a cached block has no hash"
        if not all(map(self.is_pinned, self._kept)) or any(map(self.is_pinned, self._cached)):
            yield "a block is kept that no session wants, or wanted and not kept"

    def _open(self, num_wanted: int, *, by_force: bool = False) -> None:
        limit = self.num_blocks - self.num_open
        if limit and self._grow is not None:
            granted = num_wanted if by_force else self._grow(num_wanted)
            self.num_open += min(granted, limit)

    def _evict(self) -> int:
        block_id = next(iter(self._cached))
        if self._on_evict is not None:
            self._on_evict(block_id, self._hash_of[block_id])
        del self._cached[block_id]
        del self._block_of[self._hash_of.pop(block_id)]
        return block_id
