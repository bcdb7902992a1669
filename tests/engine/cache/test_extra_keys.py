"""Extra keys: who has others never shares a block, who has the same does, and nobody learns of somebody else's."""

from __future__ import annotations

from random import Random
from struct import pack

import pytest

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.group_tables import NULL_BLOCK
from pagewick.engine.cache.prefix import PrefixHasher
from pagewick.engine.messages import PrefixMiss
from pagewick.engine.sequence import Sequence as TokenSequence
from tests.engine.requests import Simulation, full_spec, recurrent_spec, sequence, window_spec

Ranges = list[tuple[int, int, bytes]]

KEYS = [b"a", b"b", b"ab", b"\x00" * 12]
LAYOUTS = [
    [full_spec(4)],
    [full_spec(1)],
    [full_spec(2), window_spec(5, 4)],
    [window_spec(3, 2), full_spec(4)],
    [full_spec(2), recurrent_spec(4)],
]


def known_at(ranges: Ranges, num_tokens: int) -> set[tuple[int, int, bytes]]:
    """Return the extra keys of the first tokens."""
    return {(start, min(end, num_tokens), key) for start, end, key in ranges if start < num_tokens}


def some_ranges(random: Random, num_tokens: int) -> Ranges:
    """Return ranges of few kinds, so that many requests have equal or nearly equal ones."""
    ranges = []
    for _ in range(random.choice([0, 0, 1, 1, 2, 3])):
        start = random.randrange(num_tokens)
        ranges.append((start, start + random.choice([1, 2, 4, 7, 2**30]), random.choice(KEYS)))
    return ranges


def num_shared(tokens: list[int], ranges: Ranges, others: list[tuple[list[int], Ranges]], size: int) -> int:
    """Tokens of the longest prefix, in whole blocks of `size`, that stands in the cache after the others."""
    found = [0]
    for other_tokens, other_ranges in others:
        for end in range(size, min(len(tokens) - 1, len(other_tokens)) + 1, size):
            if tokens[:end] == other_tokens[:end] and known_at(ranges, end) == known_at(other_ranges, end):
                found.append(end)
    return max(found)


def compute(blocks: BlockManager, seq: TokenSequence, num_cached: int, chunk: int) -> None:
    """Compute all missing tokens, `chunk` at a time; the sequence keeps its blocks."""
    blocks.adopt_prefix(seq, num_cached)
    while seq.num_missing_tokens:
        number = min(chunk, seq.num_missing_tokens)
        assert blocks.allocate(seq, seq.num_computed_tokens + number) is not None
        blocks.mark_computed(seq, number)


def check_sharing(seq: TokenSequence, others: list[TokenSequence], specs: list[CacheSpec]) -> None:
    """A block that two hold is of tokens and keys that they have in common."""
    for group, spec in enumerate(specs):
        for other in others:
            tables = seq.block_tables[group], other.block_tables[group]
            for index, (one, same) in enumerate(zip(*tables, strict=False)):
                if one == same != NULL_BLOCK:
                    end = seq.num_tokens if spec.has_snapshots else (index + 1) * spec.block_size
                    assert seq.token_ids[:end] == other.token_ids[:end]
                    assert known_at(seq.request.extra_keys, end) == known_at(other.request.extra_keys, end)


@pytest.mark.parametrize(
    "specs", LAYOUTS, ids=lambda specs: "-".join(f"{spec.kind}{spec.block_size}" for spec in specs)
)
def test_blocks_are_shared_by_equal_keys_only(specs: list[CacheSpec]) -> None:
    random, num_hits, num_cut = Random(5), 0, 0
    unit = max(spec.block_size for spec in specs)
    documents = [[random.randrange(50) for _ in range(24)] for _ in range(2)]
    for _ in range(150):
        blocks = BlockManager(specs, [200] * len(specs), hash_key=b"key", enable_prefix_caching=True)
        few = [some_ranges(random, 20) for _ in range(3)]
        before: list[tuple[list[int], Ranges]] = []
        running: list[TokenSequence] = []
        for number in range(6):
            tokens = random.choice(documents)[: random.randint(1, 24)]
            ranges = random.choice([*few, some_ranges(random, 20)])
            seq = sequence(tokens, arrival=number, extra_keys=random.sample(ranges, len(ranges)))
            num_cached = blocks.find_prefix(seq)
            assert num_cached == num_shared(tokens, ranges, before, unit)
            compute(blocks, seq, num_cached, unit)
            check_sharing(seq, running, specs)
            num_hits += num_cached > 0
            num_cut += num_cached < num_shared(tokens, [], [(other, []) for other, _ in before], unit)
            before.append((tokens, ranges))
            running.append(seq)
        assert blocks.check_integrity(running) == []
    assert num_hits > 200 and num_cut > 200, (num_hits, num_cut)


def name(tokens: list[int], extra_keys: Ranges, num_tokens: int) -> bytes:
    return PrefixHasher(b"key", 4).of(sequence(tokens, extra_keys=extra_keys), num_tokens)


def test_keys_are_not_taken_for_tokens_nor_for_other_keys() -> None:
    tokens = [*range(8)]
    encoded = b"x" + pack("<III", 0, 4, 1) + b"y"
    different: list[Ranges] = [
        [],
        [(0, 4, b"x")],
        [(0, 4, b"y")],
        [(0, 4, b"xy")],
        [(0, 4, encoded)],
        [(0, 4, b"x"), (0, 4, b"y")],
        [(0, 3, b"x")],
        [(1, 4, b"x")],
        [(0, 3, b"x"), (3, 4, b"x")],
    ]
    assert len({name(tokens, ranges, 4) for ranges in different}) == len(different)
    # As long as the key seems to go on, it may be the same one; then it is not.
    assert name(tokens, [(0, 8, b"x")], 4) == name(tokens, [(0, 4, b"x")], 4)
    later = [[(0, 8, b"x")], [(0, 4, b"x")], [(0, 4, b"x"), (4, 8, b"x")], [(0, 5, b"x")], [(0, 4, b"x"), (4, 5, b"x")]]
    assert len({name(tokens, ranges, 8) for ranges in later}) == 5
    assert name(tokens, [(0, 4, b"x"), (0, 4, b"y")], 8) == name(tokens, [(0, 4, b"y"), (0, 4, b"x")], 8)
    assert name(tokens, [(0, 4, b"x"), (0, 8, b"x")], 8) != name(tokens, [(0, 8, b"x")], 8)
    # An adapter's range, however far the sequence has got when it is asked for again.
    assert name(tokens, [(0, 2**31 - 1, b"x")], 8) == name(tokens, [(0, 8, b"x")], 8)


def test_names_without_keys_are_what_they_were() -> None:
    """Or nothing on disk would be found any more."""
    assert name([*range(8)], [(8, 9, b"x")], 8) == name([*range(8)], [], 8)
    assert name([*range(8)], [], 8).hex() == "05f50abb1285d8ab605a16a2e475eaec"


def miss(blocks: BlockManager, tokens: list[int], extra_keys: Ranges) -> PrefixMiss | None:
    seq = sequence(tokens, extra_keys=extra_keys)
    return blocks.explain_miss(seq, blocks.find_prefix(seq))


def test_a_miss_is_explained_by_blocks_of_equal_keys_only() -> None:
    blocks = BlockManager([full_spec()], [16], hash_key=b"key", enable_prefix_caching=True)
    cached = sequence(range(12), extra_keys=[(5, 7, b"mine")])
    compute(blocks, cached, 0, 12)
    theirs = [(5, 7, b"theirs")]
    assert miss(blocks, [*range(10), 50, 51, 52], [(5, 7, b"mine")]) == PrefixMiss(10, 50, 10)
    # Not 10: that would say what stands behind somebody else's image.
    assert miss(blocks, [*range(10), 50, 51, 52], theirs) == PrefixMiss(4, 4, None)
    assert miss(blocks, [*range(10), 50, 51, 52], []) == PrefixMiss(4, 4, None)
    assert miss(blocks, [0, 1, 9, 3, *range(4, 12), 50], theirs) == PrefixMiss(2, 9, 2)
    blocks.free(cached)
    other = sequence(range(12), extra_keys=theirs)
    compute(blocks, other, blocks.find_prefix(other), 12)
    assert miss(blocks, [*range(10), 50, 51, 52], theirs) == PrefixMiss(10, 50, 10)
    blocks.discard(other)
    assert miss(blocks, [*range(10), 50, 51, 52], theirs) == PrefixMiss(0, 0, None)
    assert miss(blocks, [*range(10), 50, 51, 52], [(5, 7, b"mine")]) is not None


def test_a_salt_cannot_be_made_to_look_like_a_key() -> None:
    blocks = BlockManager([full_spec()], [16], hash_key=b"key", enable_prefix_caching=True)
    compute(blocks, sequence(range(9), cache_salt="s", extra_keys=[(0, 4, b"x")]), 0, 9)
    salt = "s" + (pack("<III", 0, 4, 1) + b"x").decode()
    seq = sequence([0, 1, 2, 40, *range(5)], cache_salt=salt)
    assert blocks.explain_miss(seq, blocks.find_prefix(seq)) == PrefixMiss(0, 0, None)


def test_the_disk_s_names_follow() -> None:
    simulation = Simulation(disk_capacity=[30])
    simulation.add(range(13), max_tokens=2, extra_keys=[(6, 9, b"image")])
    simulation.run()
    assert simulation.runner.transfer(simulation.scheduler.save_cache().transfers) == []
    for keys, num_cached in (([(6, 9, b"image")], 12), ([(6, 9, b"other")], 4), ([], 4), ([(0, 9, b"image")], 0)):
        simulation.restart()
        found = simulation.add(range(13), max_tokens=2, extra_keys=keys).request.request_id
        assert simulation.run()[found][-1].num_cached_tokens == num_cached
