"""BlockManager: which blocks each sequence has in every cache group, which of them it shares, where evicted ones go.

Complete blocks are known by the hash of every token up to their end and never change, so sequences share them. A block
that is still being filled belongs to one sequence, and a fork gets a copy of it. Blocks that the pools evict go to host
memory and from there to disk, if there are such tiers, and prefixes are found there as they are in the pools.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import Tier, Transfer
from pagewick.engine.cache.block_pool import BlockPool
from pagewick.engine.cache.group_tables import NULL_BLOCK, RoutineTokens, StateTables, TokenTables
from pagewick.engine.cache.prefix import PrefixHasher, PrefixTree, encoded_extra_keys
from pagewick.engine.cache.prompt_chunks import PromptChunks
from pagewick.engine.cache.tiers import DiskTier, GroupTiers, HostTier
from pagewick.engine.messages import EngineStats, PrefixMiss
from pagewick.engine.sequence import Sequence as TokenSequence

Grow = Callable[[int], int]


class BlockManager:
    """Gives sequences the blocks that their tokens need in every cache group, all or nothing.

    groups: the specs; their block sizes are multiples of the smallest one. num_blocks: the size of each group's pool.
    hash_key: secret of this cache, at most 64 bytes. grow: per group, see BlockPool.
    host, disk: tiers for evicted blocks, per group; without prefix caching they serve only preempted sequences.
    """

    def __init__(
        self,
        groups: Sequence[CacheSpec],
        num_blocks: Sequence[int],
        *,
        hash_key: bytes,
        enable_prefix_caching: bool,
        grow: Sequence[Grow] | None = None,
        host: Sequence[HostTier] = (),
        disk: Sequence[DiskTier] = (),
    ) -> None:
        self.groups = list(groups)
        self._transfers: list[Transfer] = []
        self.pools = [
            BlockPool(number, grow=grow[group] if grow else None, on_evict=partial(self._on_evict, group))
            for group, number in enumerate(num_blocks)
        ]
        self.tiers = [
            GroupTiers(group, host[group] if host else None, disk[group] if disk else None, self._transfers)
            for group in range(len(groups))
        ]
        self._caches = enable_prefix_caching or bool(host or disk)
        self._tables: list[TokenTables | StateTables] = [
            StateTables(spec, pool, keeps_snapshots=self._caches) if spec.has_snapshots else TokenTables(spec, pool)
            for spec, pool in zip(groups, self.pools, strict=True)
        ]
        self.has_states = any(spec.has_snapshots for spec in groups)
        self._is_shared, self._hash_size = enable_prefix_caching, min(spec.block_size for spec in groups)
        self._hasher = PrefixHasher(hash_key, self._hash_size, is_shared=enable_prefix_caching)
        self._tree, self._hit_unit = PrefixTree(), math.lcm(*(spec.block_size for spec in groups))
        self.chunks, self.routine = PromptChunks(groups, keeps_snapshots=self._caches), RoutineTokens(groups)

    def find_prefix(self, seq: TokenSequence) -> int:
        """Return the length of the longest cached prefix, in tokens; at least one token remains to be computed.

        Every group must have the prefix, in any tier.
        """
        if not self._caches or not seq.may_use_prefix_cache:
            return 0
        return self._longest_prefix(seq, seq.num_tokens - 1)

    def can_start(
        self,
        seq: TokenSequence,
        num_cached: int,
        num_tokens: int,
        victims: Iterable[TokenSequence] = (),
        *,
        without_sessions: bool = False,
        by_force: bool = False,
    ) -> bool:
        """Whether a sequence without blocks could take this prefix and continue to `num_tokens` tokens.

        Groups that keep every token must have room for all of its tokens. victims: sequences that would give their
        blocks back. without_sessions: whether all sessions would, too. by_force: see BlockPool.has_room.
        """
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            freed = self._freed_by(victims, group, without_sessions)
            num_needed = self._tables[group].num_to_start(seq.num_tokens, num_cached, num_tokens)
            for _, key in self._prefix_blocks(seq, spec, num_cached):
                block_id = pool.lookup(key)
                # A block of the prefix that must be loaded needs a new one; an evictable one is no longer available.
                is_spared = block_id in freed or (without_sessions and block_id is not None and pool.is_kept(block_id))
                num_needed += block_id is None or is_spared or pool.is_evictable(block_id)
            num_spare = len(freed) + (pool.num_kept if without_sessions else 0)
            if not pool.has_room(num_needed - num_spare, by_force=by_force):
                return False
        return True

    def adopt_prefix(self, seq: TokenSequence, num_cached: int) -> None:
        """Give a sequence without blocks those of the prefix that find_prefix has just found."""
        seq.num_computed_tokens = num_cached
        prefixes: list[list[int]] = []
        absent: list[tuple[int, int, int, bytes, int | None]] = []
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            prefix: list[int] = []
            for index, key in self._prefix_blocks(seq, spec, num_cached):
                block_id = pool.lookup(key)
                if block_id is None:
                    # All are taken first, so that an eviction for the first one loaded does not push out the next.
                    absent.append((group, index, len(prefix), key, self.tiers[group].take(key)))
                    block_id = NULL_BLOCK
                else:
                    pool.share(block_id)
                prefix.append(block_id)
            prefixes.append(prefix)
        for group, index, place, key, host_slot in absent:
            block_id = self.pools[group].acquire()
            self.tiers[group].load(key, host_slot, block_id)
            self._register(seq, group, index, block_id)
            prefixes[group][place] = block_id
        seq.block_tables = [
            tables.begin(num_cached, prefix) for tables, prefix in zip(self._tables, prefixes, strict=True)
        ]

    def allocate(
        self, seq: TokenSequence, num_tokens: int, *, by_force: bool = False, for_drafts: bool = False
    ) -> list[list[int]] | None:
        """Extend the block tables to `num_tokens` tokens; return SlotWork.new_block_ids, or None if blocks are short.

        by_force: as in BlockPool.has_room. for_drafts: the step has blocks for all tokens but the draft tokens.
        """
        wanted = [
            tables.num_lacking(seq, table, num_tokens, for_drafts=for_drafts)
            for tables, table in zip(self._tables, seq.block_tables, strict=True)
        ]
        if not any(wanted) and (for_drafts or not self.has_states):
            return [[] for _ in wanted]
        if not all(pool.has_room(n, by_force=by_force) for pool, n in zip(self.pools, wanted, strict=True)):
            return None
        return [
            tables.extend(seq, table, number, for_drafts=for_drafts)
            for tables, table, number in zip(self._tables, seq.block_tables, wanted, strict=True)
        ]

    def mark_next_computed(self, seq: TokenSequence) -> None:
        """Note one more computed token."""
        if self.routine.changes_blocks(seq.num_computed_tokens + 1):
            self.mark_computed(seq, 1)
        else:
            seq.num_computed_tokens += 1

    def mark_computed(self, seq: TokenSequence, num_tokens: int) -> None:
        """Note `num_tokens` more computed tokens: complete blocks can serve others, and unneeded ones are released."""
        before = seq.num_computed_tokens
        seq.num_computed_tokens = after = before + num_tokens
        for group, (tables, table) in enumerate(zip(self._tables, seq.block_tables, strict=True)):
            if self._caches:
                for index, block_id in tables.completed(table, before, after):
                    self._register(seq, group, index, block_id)
            tables.release_unneeded(table, before, after)

    def fork(self, parent: TokenSequence, child: TokenSequence, num_tokens: int) -> bool:
        """Give `child` the parent's first `num_tokens` computed tokens: complete blocks shared, the last one copied.

        False, and the child has no blocks, if there is no room for the copy or the parent has released needed blocks.
        """
        for spec, pool, tables, table in zip(self.groups, self.pools, self._tables, parent.block_tables, strict=True):
            has_state = not spec.has_snapshots or num_tokens == parent.num_scheduled_tokens
            has_all = has_state and tables.has_all(table, num_tokens)
            if not has_all or not pool.has_room(tables.is_copied(num_tokens)):
                return False
        child.num_computed_tokens = num_tokens
        if self._is_shared:
            child.block_hashes = parent.block_hashes[: num_tokens // self._hash_size]
        child.block_tables = []
        for group, tables in enumerate(self._tables):
            table, source = tables.fork(parent.block_tables[group], num_tokens)
            if source is not None:
                self._transfers.append(Transfer(group, Tier.DEVICE, source, Tier.DEVICE, table[-1]))
            child.block_tables.append(table)
        return True

    def free(self, seq: TokenSequence) -> None:
        """Release all blocks, the last first: the beginning of a prefix is worth most and is evicted last."""
        if seq.is_finished and self._caches and not self._is_shared:
            self.discard(seq)
        for pool, table in zip(self.pools, seq.block_tables, strict=False):
            for block_id in reversed(table):
                if block_id != NULL_BLOCK:
                    pool.release(block_id)
        seq.block_tables = []
        seq.num_computed_tokens = 0

    def holds_any(self, seq: TokenSequence, keys: Iterable[bytes]) -> bool:
        """Whether the sequence holds a block with one of these hashes."""
        return any(
            pool.lookup(key) in table for pool, table in zip(self.pools, seq.block_tables, strict=True) for key in keys
        )

    def discard(self, seq: TokenSequence) -> None:
        """Keep the sequence's blocks from serving others: they are wrong, or no other sequence can have this prefix."""
        for group, spec in enumerate(self.groups):
            for index in range(len(seq.block_hashes) * self._hash_size // spec.block_size):
                self.forget(group, self._hash(seq, spec, index))

    def forget(self, group: int, key: bytes) -> None:
        """Keep a block from serving prefix hits, wherever it is."""
        self.pools[group].unregister(key)
        self.tiers[group].forget(key)
        self._drop_from_tree(group, key)

    def pin(self, seq: TokenSequence) -> list[list[bytes]]:
        """Keep the blocks needed to continue the sequence from eviction until `unpin`; return their keys per group."""
        num_tokens = self._longest_prefix(seq, seq.num_computed_tokens) if self._is_shared else 0
        pinned = [[key for _, key in self._prefix_blocks(seq, spec, num_tokens)] for spec in self.groups]
        for pool, keys in zip(self.pools, pinned, strict=True):
            for key in keys:
                pool.pin(key)
        return pinned

    def unpin(self, pinned: Sequence[Sequence[bytes]]) -> None:
        for pool, keys in zip(self.pools, pinned, strict=True):
            for key in reversed(keys):
                pool.unpin(key)

    def take_transfers(self) -> list[Transfer]:
        """Return and clear the transfers that must run before the next step, in their order."""
        taken = self._transfers.copy()
        self._transfers.clear()
        return taken

    def stop_writing(self) -> None:
        """Note that the disk has refused a block."""
        for tiers in self.tiers:
            tiers.disk.close()

    def save_to_disk(self) -> None:
        """Write every cached block that is not there yet to disk, if there is one."""
        for pool, tiers in zip(self.pools, self.tiers, strict=True):
            tiers.write_all(pool.cached_blocks())

    def explain_miss(self, seq: TokenSequence, num_cached: int) -> PrefixMiss | None:
        """Return where the prompt differs from the closest cached prefix; None if the hit is as long as possible.

        Only the first cache group is searched, because hits in the others need its blocks, too.
        """
        spec = self.groups[0]
        prompt = seq.request.prompt_token_ids
        if not self._is_shared or num_cached >= (len(prompt) - 1) // self._hit_unit * self._hit_unit:
            return None
        # The first group may have more blocks of the prompt than the others.
        first, last = num_cached, num_cached + spec.block_size
        while last <= len(prompt) and self._has(0, self._hasher.of(seq, last)):
            first, last = last, last + spec.block_size
        extra_keys = encoded_extra_keys(seq, first, last)
        num_common, cached_token_id = self._tree.closest(self._hasher.of(seq, first), prompt[first:last], extra_keys)
        position = first + num_common
        if position >= len(prompt):
            return None
        return PrefixMiss(position, prompt[position], cached_token_id)

    def count_into(self, stats: EngineStats) -> None:
        """Set the gauges of blocks, summed over all groups."""
        stats.num_blocks = sum(pool.num_open for pool in self.pools)
        stats.num_free_blocks = sum(pool.num_free for pool in self.pools)
        stats.num_cached_blocks = sum(pool.num_cached for pool in self.pools)
        stats.num_referenced_blocks = sum(pool.num_referenced for pool in self.pools)
        stats.num_session_blocks = sum(pool.num_kept for pool in self.pools)
        stats.num_host_blocks = sum(len(tiers.host) for tiers in self.tiers)
        stats.num_disk_blocks = sum(len(tiers.disk) for tiers in self.tiers)
        stats.num_blocks_saved = sum(tiers.num_saved for tiers in self.tiers)
        stats.num_blocks_loaded = sum(tiers.num_loaded for tiers in self.tiers)

    def check_integrity(self, sequences: Iterable[TokenSequence]) -> list[str]:
        """Return contradictions between the pools and the sequences that hold blocks; empty if all is well."""
        holders = [seq for seq in sequences if seq.block_tables]
        found = []
        for group, (pool, tiers) in enumerate(zip(self.pools, self.tiers, strict=True)):
            held = Counter(
                block_id for seq in holders for block_id in seq.block_tables[group] if block_id != NULL_BLOCK
            )
            problems = [*pool.problems(held), *tiers.host.problems()]
            for seq in holders:
                problems += self._tables[group].problems(seq.block_tables[group], seq.num_computed_tokens)
            found += [f"group {group}: {problem}" for problem in problems]
        return found

    def _longest_prefix(self, seq: TokenSequence, longest: int) -> int:
        """Return the length of the longest prefix that every group has, in tokens, up to `longest`."""
        for group, spec in enumerate(self.groups):
            if spec.lookback is None:
                end = 0
                while (end := end + spec.block_size) <= longest and self._has(group, self._hasher.of(seq, end)):
                    pass
                longest = end - spec.block_size
        for num_tokens in range(longest // self._hit_unit * self._hit_unit, 0, -self._hit_unit):
            if all(
                self._has(group, key)
                for group, spec in enumerate(self.groups)
                if spec.lookback is not None  # the others have been searched above
                for _, key in self._prefix_blocks(seq, spec, num_tokens)
            ):
                return num_tokens
        return 0

    def _freed_by(self, victims: Iterable[TokenSequence], group: int, without_sessions: bool) -> set[int]:
        """Return the blocks of a group that would have no holder without these sequences."""
        pool = self.pools[group]
        held = Counter(block_id for seq in victims for block_id in seq.block_tables[group] if block_id != NULL_BLOCK)
        return {
            block_id
            for block_id, number in held.items()
            if number == pool.num_holders(block_id) and (without_sessions or not pool.is_pinned(block_id))
        }

    def _prefix_blocks(self, seq: TokenSequence, spec: CacheSpec, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield (index, key) of the blocks needed to continue after `num_tokens` tokens, a multiple of block_size."""
        for index in range(spec.first_block(num_tokens), num_tokens // spec.block_size):
            yield index, self._hash(seq, spec, index)

    def _has(self, group: int, key: bytes) -> bool:
        return self.pools[group].lookup(key) is not None or key in self.tiers[group]

    def _hash(self, seq: TokenSequence, spec: CacheSpec, index: int) -> bytes:
        return self._hasher.of(seq, (index + 1) * spec.block_size)

    def _register(self, seq: TokenSequence, group: int, index: int, block_id: int) -> None:
        key = self._hash(seq, self.groups[group], index)
        if not self.pools[group].register(block_id, key):
            return
        self.tiers[group].add(block_id, key)
        if group == 0 and self._is_shared:
            size = self.groups[0].block_size
            first, last = index * size, (index + 1) * size
            parent, extra_keys = self._hasher.of(seq, first), encoded_extra_keys(seq, first, last)
            self._tree.add(parent, key, seq.token_ids[first:last], extra_keys)

    def _on_evict(self, group: int, block_id: int, key: bytes) -> None:
        for gone in self.tiers[group].save(block_id, key):
            self._drop_from_tree(group, gone)

    def _drop_from_tree(self, group: int, key: bytes) -> None:
        if group == 0:
            self._tree.remove(key)
