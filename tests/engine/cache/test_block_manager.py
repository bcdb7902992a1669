"""Sharing, eviction and counting of blocks, without a scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import Tier, Transfer
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.group_tables import NULL_BLOCK
from pagewick.engine.sequence import Sequence as TokenSequence
from tests.engine.requests import full_spec, recurrent_spec, sequence, window_spec


def manager(*specs: CacheSpec, num_blocks: int = 16, key: bytes = b"key", caching: bool = True) -> BlockManager:
    return BlockManager(specs, [num_blocks] * len(specs), hash_key=key, enable_prefix_caching=caching)


def adopt(blocks: BlockManager, seq: TokenSequence) -> int:
    """Start a sequence with what is there of it; how many tokens that is."""
    num_cached = blocks.find_prefix(seq)
    blocks.adopt_prefix(seq, num_cached)
    return num_cached


def compute(blocks: BlockManager, seq: TokenSequence, chunks: Sequence[int] = ()) -> None:
    """Compute all missing tokens, in chunks of the given sizes."""
    for num_tokens in chunks or [seq.num_missing_tokens]:
        assert blocks.allocate(seq, seq.num_computed_tokens + num_tokens) is not None
        blocks.mark_computed(seq, num_tokens)


def run_alone(blocks: BlockManager, seq: TokenSequence, chunks: Sequence[int] = ()) -> int:
    """Compute a sequence and let it go; how many of its tokens were there already."""
    adopt(blocks, seq)
    num_cached_tokens = seq.num_computed_tokens
    compute(blocks, seq, chunks)
    assert blocks.check_integrity([seq]) == []
    blocks.free(seq)
    assert blocks.check_integrity([]) == []
    assert all(pool.num_referenced == 0 for pool in blocks.pools)
    return num_cached_tokens


@pytest.mark.parametrize(("num_common", "num_hit"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (13, 12)])
def test_a_hit_is_the_common_prefix_in_whole_blocks(num_common: int, num_hit: int) -> None:
    blocks = manager(full_spec())
    first = sequence(range(20))
    adopt(blocks, first)
    compute(blocks, first)
    second = sequence([*range(num_common), *range(50, 60)])
    adopt(blocks, second)
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
    adopt(blocks, seq)
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
    assert not blocks.can_start(seq, 0, 8)
    adopt(blocks, seq)
    assert blocks.allocate(seq, 9) is None
    assert seq.block_tables == [[], []]
    assert [pool.num_available for pool in blocks.pools] == [4, 1]
    assert blocks.allocate(seq, 8) == [[0, 1], [0]]
    assert blocks.allocate(seq, 8) == [[], []]
    assert blocks.check_integrity([seq]) == []


def test_starting_takes_room_for_all_tokens_only_where_all_are_kept() -> None:
    seq = sequence(range(40))
    assert manager(window_spec(lookback=3), num_blocks=2).can_start(seq, 0, 8)
    assert not manager(window_spec(lookback=3), num_blocks=2).can_start(seq, 0, 9)
    assert not manager(full_spec(), num_blocks=9).can_start(seq, 0, 8)
    assert manager(full_spec(), num_blocks=10).can_start(seq, 0, 8)


def test_what_can_start_is_what_starts() -> None:
    """With victims and without sessions too: the answer is what comes of letting them go and counting."""
    answers = Counter(can_start_as_counted(Random(seed)) for seed in range(400))
    assert min(answers[True], answers[False]) > 100


def can_start_as_counted(random: Random) -> bool:
    specs = random.choice([[full_spec(2)], [full_spec(2), window_spec(5, 4)], [full_spec(1), recurrent_spec(4)]])
    blocks = manager(*specs, num_blocks=random.randint(8, 24))
    running, pinned = [], []
    for number in range(random.randint(1, 8)):
        common = random.randrange(16)
        seq = sequence([*range(common), *(random.randrange(50) for _ in range(random.randint(1, 12)))], arrival=number)
        if not blocks.can_start(seq, blocks.find_prefix(seq), seq.num_tokens):
            continue
        adopt(blocks, seq)
        compute(blocks, seq)
        if random.random() < 0.3:
            pinned.append(blocks.pin(seq))
        if random.random() < 0.6:
            running.append(seq)
        else:
            blocks.free(seq)
    victims = [seq for seq in running if random.random() < 0.5]
    without_sessions = random.random() < 0.5
    seq = sequence([*range(random.randrange(16)), *range(60, 60 + random.randint(1, 14))])
    num_cached = blocks.find_prefix(seq)
    end = random.randint(num_cached + 1, seq.num_tokens)
    answer = blocks.can_start(seq, num_cached, end, victims, without_sessions=without_sessions)
    for victim in victims:
        blocks.free(victim)
    for keys in pinned if without_sessions else []:
        blocks.unpin(keys)
    assert blocks.find_prefix(seq) == num_cached
    others = [other for other in running if other not in victims]
    fits = []
    for group, (spec, pool) in enumerate(zip(specs, blocks.pools, strict=True)):
        prefix = range(spec.first_block(num_cached), num_cached // spec.block_size)
        found = {pool.lookup(blocks._hash(seq, spec, index)) for index in prefix}
        taken = found | pool._kept.keys() | {block_id for other in others for block_id in other.block_tables[group]}
        num_new = spec.num_blocks(seq.num_tokens if spec.lookback is None else end) - num_cached // spec.block_size
        if spec.has_snapshots:
            num_new = 1  # for the state after the step
        fits.append(len(taken - {NULL_BLOCK}) + num_new <= pool.num_blocks)
    assert answer == all(fits)
    if answer:
        blocks.adopt_prefix(seq, num_cached)
        assert blocks.allocate(seq, end) is not None
        assert blocks.check_integrity([seq, *others]) == []
    return answer


def test_a_fork_shares_complete_blocks_and_copies_the_last() -> None:
    blocks = manager(full_spec())
    parent, child = sequence(range(10)), sequence(range(10), choice_index=1)
    adopt(blocks, parent)
    compute(blocks, parent)
    assert blocks.fork(parent, child, 9)
    assert child.num_computed_tokens == 9
    assert child.block_tables == [[*parent.block_tables[0][:2], 3]]
    assert blocks.take_transfers() == [Transfer(0, Tier.DEVICE, parent.block_tables[0][2], Tier.DEVICE, 3)]
    assert blocks.check_integrity([parent, child]) == []
    # Where it ends with a block there is nothing to copy.
    other = sequence(range(10), choice_index=2)
    assert blocks.fork(parent, other, 8)
    assert (other.block_tables, blocks.take_transfers()) == ([parent.block_tables[0][:2]], [])
    blocks.free(parent)
    compute(blocks, child)
    assert blocks.check_integrity([child, other]) == []
    blocks.free(child)
    blocks.free(other)
    assert blocks.pools[0].num_referenced == 0


def test_a_fork_that_has_no_room_gets_nothing() -> None:
    blocks = manager(full_spec(), full_spec(8), num_blocks=2)
    parent, child = sequence(range(7)), sequence(range(7))
    adopt(blocks, parent)
    compute(blocks, parent)
    assert blocks.allocate(parent, 9) is None
    assert not blocks.fork(parent, child, 6)  # the first group has no block left for the copy
    assert (child.block_tables, child.num_computed_tokens, blocks.take_transfers()) == ([], 0, [])
    assert blocks.check_integrity([parent]) == []


def test_a_fork_goes_back_only_as_far_as_the_parent_still_is() -> None:
    windowed = manager(window_spec(lookback=3))
    parent = sequence(range(12))
    adopt(windowed, parent)
    compute(windowed, parent)
    assert not windowed.fork(parent, sequence(range(12)), 7)  # position 4 has been let go
    assert windowed.fork(parent, sequence(range(12)), 11)
    recurrent = manager(recurrent_spec())
    parent = sequence(range(10))
    adopt(recurrent, parent)
    compute(recurrent, parent)
    assert not recurrent.fork(parent, sequence(range(10)), 9)  # a state cannot go back
    child = sequence(range(10))
    assert recurrent.fork(parent, child, 10)
    (copy,) = recurrent.take_transfers()
    assert (copy.source, child.block_tables) == (parent.block_tables[0][0], [[copy.destination]])


def test_a_window_lets_go_of_what_no_token_will_look_at() -> None:
    blocks = manager(window_spec(lookback=5), num_blocks=8, caching=False)
    seq = sequence(range(30))
    adopt(blocks, seq)
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
        block_id = pool.lookup(blocks._hash(seq, blocks.groups[1], index))
        assert block_id is not None
        del pool._block_of[pool._hash_of.pop(block_id)], pool._cached[block_id]
        pool._freed.append(block_id)
    adopt(blocks, seq)
    assert seq.num_computed_tokens == 24
    assert [block_id != NULL_BLOCK for block_id in seq.block_tables[1]] == [False] * 5 + [True]
    assert all(block_id != NULL_BLOCK for block_id in seq.block_tables[0])
    # One block more to look back at, and nothing can be resumed any more.
    blocks.free(seq)
    longer = sequence(range(23))
    adopt(blocks, longer)
    assert longer.num_computed_tokens == 0


def test_a_snapshot_is_there_only_where_a_step_ended() -> None:
    blocks = manager(recurrent_spec())
    run_alone(blocks, sequence(range(19)), [8, 4, 7])
    assert run_alone(blocks, sequence(range(8))) == 0  # 4: no step ended there; 8: its last token must be computed
    assert run_alone(blocks, sequence([*range(9), 99])) == 8
    assert run_alone(blocks, sequence([*range(11), 99])) == 8
    assert run_alone(blocks, sequence([*range(18)])) == 12


def test_a_state_takes_one_block_however_many_tokens_it_is_of() -> None:
    blocks = manager(recurrent_spec(), num_blocks=3)
    seq = sequence(range(1000))
    adopt(blocks, seq)
    assert seq.block_tables == [[NULL_BLOCK]]
    assert blocks.allocate(seq, 998) == [[NULL_BLOCK, 0]]
    blocks.mark_computed(seq, 998)
    assert blocks.allocate(seq, 999) == [[0, 0]], "nobody else needs the state: its successor takes its place"
    blocks.mark_computed(seq, 1)
    assert (seq.block_tables, blocks.pools[0].num_referenced, blocks.pools[0].num_cached) == ([[0]], 1, 0)
    assert blocks.allocate(seq, 1000) == [[0, 0]]
    blocks.mark_computed(seq, 1)
    # A state at a multiple of the block size stays: a sequence that continues writes to another block.
    seq.token_ids.append(5)
    assert blocks.allocate(seq, 1001) == [[0, 1]]
    assert blocks.allocate(seq, 1001) == [[0, 1]], "the step was lost and is planned again"
    blocks.mark_computed(seq, 1)
    assert (seq.block_tables, blocks.pools[0].num_referenced, blocks.pools[0].num_cached) == ([[1]], 1, 1)
    assert blocks.check_integrity([seq]) == []
    other = sequence([*range(1000), 7])
    assert adopt(blocks, other) == 1000 and other.block_tables == [[0]]
    assert blocks.allocate(other, 1001) == [[0, 2]]
    assert blocks.check_integrity([seq, other]) == []


def test_of_steps_in_flight_each_goes_on_from_the_one_before() -> None:
    blocks = manager(recurrent_spec(), num_blocks=4)
    seq = sequence(range(30))
    adopt(blocks, seq)
    rows = []
    for number in (6, 2, 4, 1):
        rows.append(blocks.allocate(seq, seq.num_scheduled_tokens + number))
        seq.num_tokens_in_flight += number
    # After 8 and after 12 tokens, there will be a snapshot, which must not be overwritten.
    assert rows == [[[NULL_BLOCK, 0]], [[0, 0]], [[0, 1]], [[1, 2]]]
    held = []
    for number in (6, 2, 4, 1):
        seq.num_tokens_in_flight -= number
        blocks.mark_computed(seq, number)
        held.append(list(seq.block_tables[0]))
        assert blocks.check_integrity([seq]) == []
    assert held == [[0, 1, 2], [0, 1, 2], [1, 2], [2]]
    assert [adopt(blocks, sequence([*range(end), 99, 99])) for end in (8, 12)] == [8, 12]


def test_without_a_prefix_cache_no_snapshots_are_kept() -> None:
    blocks = manager(recurrent_spec(), num_blocks=2, caching=False)
    seq = sequence(range(40))
    adopt(blocks, seq)
    compute(blocks, seq, [8, 4, 1, 3, 24])
    assert (seq.block_tables, blocks.pools[0].num_referenced, blocks.pools[0].num_free) == ([[0]], 1, 1)


def test_a_fork_shares_a_snapshot_and_copies_any_other_state() -> None:
    blocks = manager(recurrent_spec())
    parent, child, other = (sequence(range(11), choice_index=index) for index in range(3))
    adopt(blocks, parent)
    compute(blocks, parent, [8])
    assert blocks.fork(parent, child, 8)
    assert (child.block_tables, blocks.take_transfers()) == (parent.block_tables, [])
    compute(blocks, parent)
    compute(blocks, child)
    assert parent.block_tables != child.block_tables
    assert blocks.fork(parent, other, 11)
    copy = blocks.take_transfers()
    assert copy == [Transfer(0, Tier.DEVICE, parent.block_tables[0][0], Tier.DEVICE, other.block_tables[0][0])]
    assert blocks.check_integrity([parent, child, other]) == []


def test_a_state_that_two_go_on_from_is_overwritten_by_neither() -> None:
    """Not even when its name is forgotten, because what it was computed from turned out to be wrong."""
    blocks = manager(recurrent_spec())
    parent, child = sequence(range(11)), sequence(range(11), choice_index=1)
    adopt(blocks, parent)
    compute(blocks, parent, [8])
    assert blocks.fork(parent, child, 8)
    blocks.discard(parent)
    state = parent.block_tables[0][0]
    rows = [blocks.allocate(seq, 11) for seq in (parent, child)]
    assert rows == [[[state, 1]], [[state, 2]]]
    blocks.mark_computed(parent, 3)
    blocks.mark_computed(child, 3)
    assert blocks.check_integrity([parent, child]) == [] and blocks.pools[0].num_free == 14


def test_a_hit_is_one_that_all_groups_share() -> None:
    blocks = manager(full_spec(2), recurrent_spec(8), num_blocks=32)
    run_alone(blocks, sequence(range(31)), [8, 16, 7])
    assert blocks.chunks.alignment == 1
    seq = sequence(range(23))
    adopt(blocks, seq)
    assert seq.num_computed_tokens == 8
    assert [len(table) for table in seq.block_tables] == [4, 1]
    blocks.free(seq)
    assert run_alone(blocks, sequence(range(31))) == 24


def test_chunk_alignments_combine() -> None:
    assert manager(full_spec(), recurrent_spec(8, 6), recurrent_spec(8, 8)).chunks.alignment == 24


@pytest.mark.parametrize("damage", ["lost", "twice", "hash", "leak"])
def test_check_integrity_finds_damage(damage: str) -> None:
    blocks = manager(full_spec(), num_blocks=8)
    run_alone(blocks, sequence([9] * 5))
    seq = sequence(range(9))
    adopt(blocks, seq)
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
