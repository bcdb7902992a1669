"""Sharing, eviction and counting of blocks, without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.block_manager import NULL_BLOCK, BlockManager, BlockPool
from pagewick.engine.sequence import Sequence as TokenSequence
from tests.engine.requests import full_spec, recurrent_spec, request, window_spec


def manager(*specs: CacheSpec, num_blocks: int = 16, key: bytes = b"key", caching: bool = True) -> BlockManager:
    return BlockManager(specs, [num_blocks] * len(specs), hash_key=key, enable_prefix_caching=caching)


def sequence(token_ids: Iterable[int], **options: object) -> TokenSequence:
    return TokenSequence.from_request(request(list(token_ids), **options), 0)  # type: ignore[arg-type]


def compute(blocks: BlockManager, seq: TokenSequence, chunks: Sequence[int] = ()) -> None:
    """All tokens that are missing, in chunks of so many tokens."""
    for num_tokens in chunks or [seq.num_missing_tokens]:
        assert blocks.allocate(seq, seq.num_computed_tokens + num_tokens) is not None
        blocks.mark_computed(seq, num_tokens)


def run_alone(blocks: BlockManager, seq: TokenSequence, chunks: Sequence[int] = ()) -> int:
    """Compute a sequence and let it go; how many of its tokens were there already."""
    blocks.adopt_prefix(seq)
    num_cached_tokens = seq.num_computed_tokens
    compute(blocks, seq, chunks)
    assert blocks.check_integrity([seq]) == []
    blocks.free(seq)
    assert blocks.check_integrity([]) == []
    assert all(pool.num_referenced == 0 for pool in blocks.pools)
    return num_cached_tokens


def test_a_pool_gives_freed_blocks_then_unused_ones_then_the_least_recently_used_cached_ones() -> None:
    pool = BlockPool(4)
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
    assert pool.lookup(b"second") == second
    assert pool.acquire() == second  # released before `first`
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
    pool.register(first, b"hash")
    pool.register(second, b"hash")
    assert pool.lookup(b"hash") == first
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (1, 0)


@pytest.mark.parametrize(("num_common", "num_hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (13, 12)])
def test_a_hit_is_the_common_prefix_in_whole_blocks(num_common: int, num_hit: int) -> None:
    blocks = manager(full_spec())
    first = sequence(range(20))
    blocks.adopt_prefix(first)
    compute(blocks, first)
    second = sequence([*range(num_common), *range(50, 60)])
    blocks.adopt_prefix(second)
    assert second.num_computed_tokens == num_hit
    assert second.block_tables[0] == first.block_tables[0][: num_hit // 4]
    assert blocks.check_integrity([first, second]) == []
    assert blocks.check_integrity([first]) != [] or num_hit == 0


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_one_token_remains_to_be_computed(num_tokens: int, num_hit: int) -> None:
    blocks = manager(full_spec())
    run_alone(blocks, sequence(range(num_tokens)))
    assert run_alone(blocks, sequence(range(num_tokens))) == num_hit


def test_what_must_not_hit() -> None:
    blocks = manager(full_spec())
    run_alone(blocks, sequence(range(9), cache_salt="mine"))
    assert run_alone(blocks, sequence(range(9), cache_salt="yours")) == 0
    assert run_alone(blocks, sequence(range(9))) == 0
    assert run_alone(blocks, sequence(range(9), prompt_logprobs=0)) == 0
    assert run_alone(blocks, sequence(range(9), cache_salt="mine")) == 8
    # A block's place in the prefix counts: the same four tokens further on are others.
    assert run_alone(blocks, sequence([*range(4, 8), *range(4)])) == 0
    off = manager(full_spec(), caching=False)
    run_alone(off, sequence(range(9)))
    assert run_alone(off, sequence(range(9))) == 0
    assert off.pools[0].num_free == 16


def test_hashes_depend_on_the_key() -> None:
    hashes = []
    for key in (b"one", b"two"):
        seq = sequence(range(8))
        run_alone(manager(full_spec(), key=key), seq)
        hashes.append(seq.block_hashes)
    assert len(set(hashes[0] + hashes[1])) == 4


def test_output_tokens_serve_as_a_prefix_too() -> None:
    blocks = manager(full_spec())
    seq = sequence(range(6))
    blocks.adopt_prefix(seq)
    compute(blocks, seq)
    for token_id in range(6, 10):
        seq.token_ids.append(token_id)
        compute(blocks, seq)
    blocks.free(seq)
    assert run_alone(blocks, sequence(range(30))) == 8


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    blocks = manager(full_spec(), num_blocks=4)
    run_alone(blocks, sequence(range(16)))
    run_alone(blocks, sequence([99] * 3))
    assert run_alone(blocks, sequence(range(16))) == 12


def test_allocation_is_all_or_nothing_over_the_groups() -> None:
    blocks = BlockManager([full_spec(), full_spec(8)], [4, 1], hash_key=b"", enable_prefix_caching=True)
    seq = sequence(range(16))
    blocks.adopt_prefix(seq)
    assert not blocks.can_hold(seq, 9, 9)
    assert blocks.allocate(seq, 9) is None
    assert seq.block_tables == [[], []]
    assert [pool.num_available for pool in blocks.pools] == [4, 1]
    assert blocks.can_hold(seq, 8, 8)
    assert blocks.allocate(seq, 8) == [[0, 1], [0]]
    assert blocks.allocate(seq, 8) == [[], []]
    assert blocks.check_integrity([seq]) == []


def test_can_hold_counts_later_tokens_only_where_all_are_kept() -> None:
    seq = sequence(range(40))
    windowed = manager(window_spec(lookback=3), num_blocks=2)
    windowed.adopt_prefix(seq)
    assert windowed.can_hold(seq, 8, 40)
    assert not windowed.can_hold(seq, 9, 40)
    keeping = manager(full_spec(), num_blocks=2)
    keeping.adopt_prefix(seq)
    assert not keeping.can_hold(seq, 8, 40)


def test_a_window_lets_go_of_what_no_token_will_look_at() -> None:
    blocks = manager(window_spec(lookback=5), num_blocks=8, caching=False)
    seq = sequence(range(30))
    blocks.adopt_prefix(seq)
    compute(blocks, seq, [9])
    assert [block_id != NULL_BLOCK for block_id in seq.block_tables[0]] == [False, True, True]
    compute(blocks, seq, [4] * 5)
    assert [block_id != NULL_BLOCK for block_id in seq.block_tables[0]] == [False] * 6 + [True] * 2
    assert blocks.pools[0].num_referenced == 2


def test_a_window_hits_where_only_its_last_blocks_are_left() -> None:
    blocks = manager(full_spec(), window_spec(lookback=3), num_blocks=8)
    run_alone(blocks, sequence(range(25)))
    seq = sequence(range(30))
    pool = blocks.pools[1]
    for index in range(5):  # all but the sixth block, which is all that token 24 looks back at
        block_id = pool.lookup(blocks._prefix_hash(seq, (index + 1) * 4))
        assert block_id is not None
        del pool._block_of[pool._hash_of.pop(block_id)], pool._cached[block_id]
        pool._freed.append(block_id)
    blocks.adopt_prefix(seq)
    assert seq.num_computed_tokens == 24
    assert [block_id != NULL_BLOCK for block_id in seq.block_tables[1]] == [False] * 5 + [True]
    assert all(block_id != NULL_BLOCK for block_id in seq.block_tables[0])
    # One block more to look back at, and nothing can be resumed any more.
    blocks.free(seq)
    longer = sequence(range(23))
    blocks.adopt_prefix(longer)
    assert longer.num_computed_tokens == 0


def test_a_snapshot_is_there_only_where_a_step_ended() -> None:
    blocks = manager(recurrent_spec())
    run_alone(blocks, sequence(range(19)), [8, 4, 7])
    assert run_alone(blocks, sequence(range(8))) == 0  # 4: no step ended there; 8: its last token must be computed
    assert run_alone(blocks, sequence([*range(9), 99])) == 8
    assert run_alone(blocks, sequence([*range(11), 99])) == 8
    assert run_alone(blocks, sequence([*range(18)])) == 12


def test_a_hit_is_one_that_all_groups_share() -> None:
    blocks = manager(full_spec(2), recurrent_spec(8), num_blocks=32)
    run_alone(blocks, sequence(range(31)), [8, 16, 7])
    assert blocks.chunk_alignment == 1
    seq = sequence(range(23))
    blocks.adopt_prefix(seq)
    assert seq.num_computed_tokens == 8
    assert [len(table) for table in seq.block_tables] == [4, 1]
    blocks.free(seq)
    assert run_alone(blocks, sequence(range(31))) == 24


def test_chunk_alignments_combine() -> None:
    assert manager(full_spec(), recurrent_spec(8, 6), recurrent_spec(8, 8)).chunk_alignment == 24


@pytest.mark.parametrize("damage", ["lost", "twice", "hash", "leak"])
def test_check_integrity_finds_damage(damage: str) -> None:
    blocks = manager(full_spec(), num_blocks=8)
    run_alone(blocks, sequence([9] * 5))
    seq = sequence(range(9))
    blocks.adopt_prefix(seq)
    compute(blocks, seq)
    assert blocks.check_integrity([seq]) == []
    pool = blocks.pools[0]
    if damage == "lost":
        pool.acquire()
    elif damage == "twice":
        pool._freed.append(seq.block_tables[0][0])
    elif damage == "hash":
        del pool._block_of[next(iter(pool._block_of))]
    else:
        seq.block_tables[0].pop()
    assert blocks.check_integrity([seq]) != []
