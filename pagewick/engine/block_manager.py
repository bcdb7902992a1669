"""Paged KV blocks: which sequence holds which block, which blocks are shared, which can be reused. No tensors here.

Every cache group has a pool of blocks of its own. A block is at any time in one of three states:

    free        nobody holds it and it holds nothing worth keeping
    cached      nobody holds it, but its content can serve a prefix hit; it is taken last, least recently used first
    referenced  held by one sequence, or by several with the same prefix

and free + cached + referenced == total. A complete block is known by the hash of every token up to its end, chained
and keyed, so that two prefixes share blocks only if they are equal, and nobody outside can make them collide.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.sequence import Sequence as TokenSequence

NULL_BLOCK: Final = -1


class BlockPool:
    """The blocks of one cache group, by number."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._freed: list[int] = []
        self._num_touched = 0  # blocks from here on were never used: their memory is not committed yet
        self._cached: dict[int, None] = {}  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def acquire(self) -> int:
        """A block for new content: one that was freed, else one never used, else the least recently used cached one."""
        if self._freed:
            block_id = self._freed.pop()
        elif self._num_touched < self.num_blocks:
            block_id = self._num_touched
            self._num_touched += 1
        else:
            block_id = next(iter(self._cached))
            del self._cached[block_id]
            del self._block_of[self._hash_of.pop(block_id)]
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """One more holder of a block found by `lookup`."""
        self._cached.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """One holder less."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if block_id in self._hash_of:
                self._cached[block_id] = None
            else:
                self._freed.append(block_id)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """The block is complete and can serve prefix hits, unless another block already does."""
        if block_hash not in self._block_of and block_id not in self._hash_of:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def lookup(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def problems(self, held: Counter[int]) -> Iterable[str]:
        """What contradicts the invariants, given how many sequences hold each block."""
        for block_id, count in enumerate(self._ref_counts):
            if count != held[block_id]:
                yield f"block {block_id} has {count} references and {held[block_id]} holders"
            states = (count > 0) + (block_id in self._cached) + self._freed.count(block_id)
            if states + (block_id >= self._num_touched) != 1:
                yield f"block {block_id} is not in exactly one state"
        if {block: hash_ for hash_, block in self._block_of.items()} != self._hash_of:
            yield "hashes and blocks do not map onto each other"
        if not self._cached.keys() <= self._hash_of.keys():
            yield "a cached block has no hash"


class BlockManager:
    """Gives sequences the blocks that their tokens need in every cache group, all or nothing.

    groups: the specs; their block sizes are multiples of the smallest one. num_blocks: the size of each group's pool.
    hash_key: secret of this cache, at most 64 bytes.
    """

    def __init__(
        self, groups: Sequence[CacheSpec], num_blocks: Sequence[int], *, hash_key: bytes, enable_prefix_caching: bool
    ) -> None:
        self.groups = list(groups)
        self.pools = [BlockPool(number) for number in num_blocks]
        self._hash_key = hash_key
        self._enable_prefix_caching = enable_prefix_caching
        self._hash_block_size = min(spec.block_size for spec in groups)
        self._hit_unit = math.lcm(*(spec.block_size for spec in groups))
        self.chunk_alignment = math.lcm(*(spec.chunk_alignment for spec in groups))

    def adopt_prefix(self, seq: TokenSequence) -> None:
        """Give a sequence without blocks those of the longest prefix that every group has, and count it as computed.

        At least one token remains to be computed, for its logits.
        """
        seq.block_tables = [[] for _ in self.groups]
        seq.num_computed_tokens = 0
        if self._enable_prefix_caching and seq.may_use_prefix_cache:
            seq.num_computed_tokens = self._longest_hit(seq)
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            table = seq.block_tables[group]
            table += [NULL_BLOCK] * spec.first_block(seq.num_computed_tokens)
            for index in range(len(table), seq.num_computed_tokens // spec.block_size):
                block_id = self._cached_block(seq, group, index)
                assert block_id is not None, "a hit that _longest_hit has just seen"
                pool.share(block_id)
                table.append(block_id)

    def can_hold(self, seq: TokenSequence, num_tokens: int, num_all_tokens: int) -> bool:
        """Whether blocks for `num_tokens` are there, and for `num_all_tokens` in groups that keep every token."""
        return all(
            spec.num_blocks(num_all_tokens if spec.lookback is None else num_tokens) - len(table) <= pool.num_available
            for spec, pool, table in zip(self.groups, self.pools, seq.block_tables, strict=True)
        )

    def allocate(self, seq: TokenSequence, num_tokens: int) -> list[list[int]] | None:
        """Extend the block tables to `num_tokens` tokens; the new block ids per group, or None if there are too few."""
        if not self.can_hold(seq, num_tokens, num_tokens):
            return None
        new_block_ids = []
        for spec, pool, table in zip(self.groups, self.pools, seq.block_tables, strict=True):
            new_block_ids.append([pool.acquire() for _ in range(spec.num_blocks(num_tokens) - len(table))])
            table += new_block_ids[-1]
        return new_block_ids

    def mark_computed(self, seq: TokenSequence, num_tokens: int) -> None:
        """`num_tokens` more tokens are in the cache: complete blocks can serve others, unneeded ones are let go."""
        before = seq.num_computed_tokens
        seq.num_computed_tokens = after = before + num_tokens
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            table = seq.block_tables[group]
            if self._enable_prefix_caching:
                for index in self._completed_blocks(spec, before, after):
                    pool.register(table[index], self._prefix_hash(seq, (index + 1) * spec.block_size))
            for index in range(spec.first_block(before), spec.first_block(after)):
                pool.release(table[index])
                table[index] = NULL_BLOCK

    def free(self, seq: TokenSequence) -> None:
        """Let go of all blocks, the last first: the beginning of a prefix is worth most and is evicted last."""
        for pool, table in zip(self.pools, seq.block_tables, strict=False):
            for block_id in reversed(table):
                if block_id != NULL_BLOCK:
                    pool.release(block_id)
        seq.block_tables = []
        seq.num_computed_tokens = 0

    def check_integrity(self, sequences: Iterable[TokenSequence]) -> list[str]:
        """Contradictions between the pools and the sequences that hold blocks; empty if all is well."""
        sequences = list(sequences)
        found = []
        for group, pool in enumerate(self.pools):
            tables = [seq.block_tables[group] for seq in sequences if seq.block_tables]
            held = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
            found += [f"group {group}: {problem}" for problem in pool.problems(held)]
        return found

    def _longest_hit(self, seq: TokenSequence) -> int:
        longest = seq.num_tokens - 1
        for group, spec in enumerate(self.groups):
            if spec.lookback is None:
                num_blocks = 0
                while (num_blocks + 1) * spec.block_size <= longest and self._has(seq, group, num_blocks):
                    num_blocks += 1
                longest = num_blocks * spec.block_size
        for num_tokens in range(longest // self._hit_unit * self._hit_unit, 0, -self._hit_unit):
            if all(self._can_resume(seq, group, num_tokens) for group in range(len(self.groups))):
                return num_tokens
        return 0

    def _can_resume(self, seq: TokenSequence, group: int, num_tokens: int) -> bool:
        spec = self.groups[group]
        if spec.lookback is None:
            return True  # _longest_hit has looked already
        blocks = range(spec.first_block(num_tokens), num_tokens // spec.block_size)
        return all(self._has(seq, group, index) for index in blocks)

    def _has(self, seq: TokenSequence, group: int, index: int) -> bool:
        return self._cached_block(seq, group, index) is not None

    def _cached_block(self, seq: TokenSequence, group: int, index: int) -> int | None:
        return self.pools[group].lookup(self._prefix_hash(seq, (index + 1) * self.groups[group].block_size))

    def _completed_blocks(self, spec: CacheSpec, before: int, after: int) -> range:
        if spec.prefix_reuse == "snapshots":
            last = after // spec.block_size
            return range(last - 1, last) if after % spec.block_size == 0 else range(0)
        return range(before // spec.block_size, after // spec.block_size)

    def _prefix_hash(self, seq: TokenSequence, num_tokens: int) -> bytes:
        """Hash of the first `num_tokens` tokens, a multiple of the smallest block size."""
        size = self._hash_block_size
        for index in range(len(seq.block_hashes), num_tokens // size):
            parent = seq.block_hashes[-1] if seq.block_hashes else (seq.request.cache_salt or "").encode()
            tokens = array("i", seq.token_ids[index * size : (index + 1) * size]).tobytes()
            digest = hashlib.blake2b(key=self._hash_key, digest_size=16)
            digest.update(len(parent).to_bytes(4, "little") + parent + tokens)
            seq.block_hashes.append(digest.digest())
        return seq.block_hashes[num_tokens // size - 1]
