"""Which blocks are free, cached, kept and referenced; without block tables."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewick.engine.cache.block_pool import BlockPool


def test_a_pool_gives_freed_blocks_then_unused_ones_then_the_least_recently_used_cached_ones() -> None:
    evicted: list[tuple[int, bytes]] = []
    pool = BlockPool(4, on_evict=lambda block_id, key: evicted.append((block_id, key)))
    first, second, third = pool.acquire(), pool.acquire(), pool.acquire()
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (1, 0, 3)
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.release(second)
    pool.release(first)
    pool.release(third)
    assert (pool.num_free, pool.num_cached, pool.num_available, pool.num_referenced) == (2, 2, 4, 0)
    assert pool.acquire() == third
    assert pool.acquire() == 3
    assert pool.lookup(b"second") == second and not evicted
    assert pool.acquire() == second  # released before `first`
    assert evicted == [(second, b"second")]
    assert pool.lookup(b"second") is None
    assert pool.lookup(b"first") == first


def test_a_shared_block_is_cached_again_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block_id = pool.acquire()
    pool.register(block_id, b"hash")
    pool.share(block_id)
    pool.release(block_id)
    assert pool.num_referenced == 1
    pool.release(block_id)
    assert (pool.num_referenced, pool.num_cached) == (0, 1)
    pool.share(block_id)
    assert (pool.num_referenced, pool.num_cached) == (1, 0)


def test_equal_content_is_registered_once() -> None:
    pool = BlockPool(2)
    first, second = pool.acquire(), pool.acquire()
    assert pool.register(first, b"hash")
    assert not pool.register(second, b"hash")
    assert pool.lookup(b"hash") == first
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_a_pool_grows_before_it_evicts_and_as_far_as_it_may() -> None:
    asked: list[int] = []
    answers = [2, 0, 1, 5]

    def grow(number: int) -> int:
        asked.append(number)
        return answers.pop(0)

    pool = BlockPool(4, grow=grow)
    assert (pool.num_open, pool.num_available) == (0, 0)
    assert pool.has_room(2) and pool.num_open == 2
    first = pool.acquire()
    pool.register(first, b"first")
    pool.release(first)
    pool.acquire()  # the one that is open and was never used
    assert pool.acquire() == first  # asked for one more, got none
    assert asked == [2, 1]
    assert pool.has_room(1) and pool.num_open == 3
    assert not pool.has_room(3) and pool.num_open == 4  # it is given more than there are
    assert asked == [2, 1, 1, 2]
    assert not pool.has_room(3), "nothing is left to ask for"


def test_force_opens_what_is_there_whatever_the_memory() -> None:
    pool = BlockPool(3, grow=lambda number: 0)
    assert not pool.has_room(1)
    assert pool.has_room(2, by_force=True) and pool.num_open == 2
    assert not pool.has_room(4, by_force=True) and pool.num_open == 3


def test_a_pin_outlasts_the_block() -> None:
    """It belongs to the name: what takes that name later is kept too, and the pins of two do not mix."""
    pool = BlockPool(3)
    first = pool.acquire()
    pool.register(first, b"hash")
    pool.pin(b"hash")
    pool.release(first)
    assert (pool.num_kept, pool.num_available, pool.num_cached) == (1, 2, 1)
    pool.unregister(b"hash")
    assert (pool.num_kept, pool.num_free) == (0, 3)
    second = pool.acquire()
    pool.register(second, b"hash")
    pool.pin(b"hash")
    pool.release(second)
    pool.unpin(b"hash")
    assert pool.num_kept == 1
    pool.unpin(b"hash")
    assert (pool.num_kept, pool.num_cached, pool.num_available) == (0, 1, 3)


def test_the_blocks_with_a_name_are_listed_by_use() -> None:
    pool = BlockPool(4)
    blocks = [pool.acquire() for _ in range(4)]
    for block_id, key in zip(blocks, (b"a", b"b", b"c"), strict=False):
        pool.register(block_id, key)
    pool.pin(b"a")
    for block_id in (2, 0):
        pool.release(block_id)
    assert pool.cached_blocks() == [(2, b"c"), (0, b"a"), (1, b"b")]


@pytest.mark.parametrize("damage", ["lost", "freed twice", "hash", "kept", "cached", "never used"])
def test_problems_are_seen(damage: str) -> None:
    pool = BlockPool(5)
    held, cached, kept = pool.acquire(), pool.acquire(), pool.acquire()
    pool.register(cached, b"cached")
    pool.register(kept, b"kept")
    pool.pin(b"kept")
    pool.release(cached)
    pool.release(kept)
    holders = Counter({held: 1})
    assert [*pool.problems(holders)] == []
    match damage:
        case "lost":
            holders = Counter()
        case "freed twice":
            pool._freed.append(held)
        case "hash":
            del pool._block_of[b"cached"]
        case "kept":
            pool._pins.clear()
        case "cached":
            pool._pins[b"cached"] += 1
        case "never used":
            pool._num_touched = 6
    assert [*pool.problems(holders)] != []


class PoolMachine(RuleBasedStateMachine):
    """Against a model that keeps, per block, its holders and its name."""

    @initialize(number=st.integers(1, 6), grows=st.booleans())
    def begin(self, number: int, grows: bool) -> None:
        self.pool = BlockPool(number, grow=(lambda wanted: wanted // 2) if grows else None)
        self.holders: Counter[int] = Counter()
        self.name_of: dict[int, bytes] = {}
        self.pins: Counter[bytes] = Counter()

    @precondition(lambda self: self.pool.has_room(1))
    @rule()
    def acquire(self) -> None:
        block_id = self.pool.acquire()
        assert not self.holders[block_id]
        name = self.name_of.pop(block_id, None)
        assert name is None or not self.pins[name], "a kept block is given away"
        self.holders[block_id] = 1

    @precondition(lambda self: +self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(+self.holders)))
        self.pool.release(block_id)
        self.holders[block_id] -= 1

    @precondition(lambda self: self.name_of)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.name_of)))
        self.pool.share(block_id)
        self.holders[block_id] += 1

    @precondition(lambda self: +self.holders)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data: st.DataObject, name: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted(+self.holders)))
        is_new = name not in self.name_of.values() and block_id not in self.name_of
        assert self.pool.register(block_id, name) == is_new
        if is_new:
            self.name_of[block_id] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def unregister(self, name: bytes) -> None:
        self.pool.unregister(name)
        self.name_of = {block_id: other for block_id, other in self.name_of.items() if other != name}

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def pin(self, name: bytes) -> None:
        self.pool.pin(name)
        self.pins[name] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(+self.pins)))
        self.pool.unpin(name)
        self.pins[name] -= 1

    @invariant()
    def books(self) -> None:
        pool = self.pool
        assert [*pool.problems(self.holders)] == []
        idle = [block_id for block_id in self.name_of if not self.holders[block_id]]
        kept = [block_id for block_id in idle if self.pins[self.name_of[block_id]]]
        assert (pool.num_cached, pool.num_kept) == (len(idle), len(kept))
        assert pool.num_referenced == len(+self.holders)
        assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_open <= pool.num_blocks
        assert pool.num_available == pool.num_free + len(idle) - len(kept)
        assert {name: pool.lookup(name) for name in self.name_of.values()} == {
            name: block_id for block_id, name in self.name_of.items()
        }


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
