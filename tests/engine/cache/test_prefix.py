"""Names of prefixes, and where a prompt left the ones that are cached."""

from __future__ import annotations

from random import Random

import pytest

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.cache import prefix
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.prefix import PrefixHasher, PrefixTree
from pagewick.engine.cache.tiers import HostTier
from pagewick.engine.messages import PrefixMiss
from tests.engine.requests import Simulation, full_spec, recurrent_spec, sequence, window_spec


def test_a_name_stands_for_every_token_before() -> None:
    hasher = PrefixHasher(b"key", 4)
    names = {hasher.of(sequence([*range(8)][:length] + [99] * (8 - length)), 8) for length in range(9)}
    assert len(names) == 9
    assert hasher.of(sequence(range(8)), 4) == hasher.of(sequence([0, 1, 2, 3, 9]), 4)
    assert hasher.of(sequence(range(8)), 4) != PrefixHasher(b"other", 4).of(sequence(range(8)), 4)


def test_names_of_salts_and_of_sequences_that_share_nothing() -> None:
    shared, alone = PrefixHasher(b"key", 2), PrefixHasher(b"key", 2, is_shared=False)
    salts = [None, "a", "b", "ab"]
    assert len({shared.of(sequence([1, 2], cache_salt=salt), 2) for salt in salts}) == 4
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (10, 1), (1, 10)]
    assert len({alone.of(sequence([1, 2], arrival=first, choice_index=second), 2) for first, second in places}) == 6
    # Nor with what an earlier process has left on disk.
    again = PrefixHasher(b"key", 2, is_shared=False)
    assert again.of(sequence([1, 2]), 2) != alone.of(sequence([1, 2]), 2)


def test_a_tree_says_how_far_a_prompt_follows_it() -> None:
    tree = PrefixTree()
    assert tree.closest(b"root", [1, 2, 3]) == (0, None)
    tree.add(b"root", b"one", [1, 2, 3])
    tree.add(b"root", b"two", [1, 5, 3])
    tree.add(b"one", b"three", [9, 9, 9])
    assert tree.closest(b"root", [1, 2, 4]) == (2, 3)
    assert tree.closest(b"root", [1, 7, 3]) in ((1, 2), (1, 5))
    assert tree.closest(b"root", [1, 5]) == (2, 3)
    assert tree.closest(b"one", [1]) == (0, 9)
    tree.remove(b"one")
    tree.remove(b"one")
    assert tree.closest(b"root", [1, 2, 4]) == (1, 5)
    assert tree.closest(b"one", [9]) == (1, 9)
    for name in (b"two", b"three"):
        tree.remove(name)
    assert not tree._children and not tree._place_of


def test_the_closest_of_many_blocks_is_found_while_they_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_MAX_CHUNK", 4)
    random, tree = Random(2), PrefixTree()
    known: list[list[int]] = []
    for step in range(1500):
        block = [random.randrange(6) for _ in range(3)]
        grows = step < 500 or (step % 2 == 0 and step < 1000)
        if grows and block not in known:
            tree.add(b"root", bytes(block), block)
            known.append(block)
        elif not grows and known:
            tree.remove(bytes(known.pop(random.randrange(len(known)))))
        wanted = [random.randrange(6) for _ in range(3)]
        common = {tuple(other): len(list(iter_common(other, wanted))) for other in known if other != wanted}
        longest = max(common.values(), default=0)
        possible = {other[longest] for other, number in common.items() if number == longest} or {None}
        found = tree.closest(b"root", wanted)
        assert found[0] == longest and found[1] in possible
    assert not known and not tree._children


def miss_by_definition(
    blocks: BlockManager, cached: list[list[int]], prompt: list[int], num_cached: int, unit: int
) -> tuple[int, set[int | None]] | None:
    """Where the prompt leaves the closest of all prefixes that the first group has in whole blocks, and for what."""
    if num_cached == (len(prompt) - 1) // unit * unit:
        return None
    size = blocks.groups[0].block_size
    chains = [[]]
    for token_ids in cached:
        seq = sequence(token_ids)
        for index in range(len(token_ids) // size):
            # These blocks follow the hit; a window may have lost the beginning.
            if (index + 1) * size > num_cached and not blocks._has(0, blocks._hasher.of(seq, (index + 1) * size)):
                break
            chains.append(token_ids[: (index + 1) * size])
    common = [sum(1 for _ in iter_common(chain, prompt)) for chain in chains]
    position = max(num_cached, *common)
    if position >= len(prompt):
        return None
    others = {chain[position] for chain, number in zip(chains, common, strict=True) if number == position < len(chain)}
    return position, set(others) or {None}


def iter_common(first: list[int], second: list[int]):  # type: ignore[no-untyped-def]
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


LAYOUTS = [
    [full_spec(4)],
    [full_spec(1)],
    [full_spec(2), window_spec(5, 4)],
    [full_spec(1), recurrent_spec(4)],
    [window_spec(7, 2)],
    [window_spec(10, 4, is_chunked=True)],
]


@pytest.mark.parametrize(
    "specs", LAYOUTS, ids=lambda specs: "-".join(f"{spec.kind}{spec.block_size}" for spec in specs)
)
def test_a_miss_is_where_the_closest_cached_prefix_ends(specs: list[CacheSpec]) -> None:
    random, num_found = Random(3), 0
    unit = {1: specs[0].block_size, 2: 4}[len(specs)]
    for _ in range(150):
        host = [HostTier(random.randrange(3)) for _ in specs] if random.random() < 0.5 else ()
        blocks = BlockManager(
            specs, [random.randint(8, 24)] * len(specs), hash_key=b"key", enable_prefix_caching=True, host=host
        )
        cached = []
        for _ in range(random.randint(1, 6)):
            token_ids = [random.randrange(2) for _ in range(random.randint(1, 14))]
            seq = sequence(token_ids)
            num_cached = blocks.find_prefix(seq)
            if blocks.can_start(seq, num_cached, len(token_ids)):
                blocks.adopt_prefix(seq, num_cached)
                assert blocks.allocate(seq, len(token_ids)) is not None
                blocks.mark_computed(seq, len(token_ids) - num_cached)
                blocks.free(seq)
                cached.append(token_ids)
        prompt = [random.randrange(2) for _ in range(random.randint(1, 14))]
        seq = sequence(prompt)
        num_cached = blocks.find_prefix(seq)
        miss = blocks.explain_miss(seq, num_cached)
        expected = miss_by_definition(blocks, cached, prompt, num_cached, unit)
        if expected is None:
            assert miss is None
        else:
            assert miss is not None
            position, tokens = expected
            assert (miss.position, miss.token_id) == (position, prompt[position])
            assert miss.cached_token_id in tokens
            num_found += 1
    assert num_found > 30


def test_the_first_delta_says_where_the_prompt_missed() -> None:
    simulation = Simulation()
    simulation.add(range(12), max_tokens=1)
    assert simulation.run()["r1"][0].prefix_miss == PrefixMiss(0, 0, None)
    simulation.add([*range(6), 30, 31, 32], max_tokens=2)
    first, second = simulation.run()["r2"]
    assert (first.num_cached_tokens, first.prefix_miss) == (4, PrefixMiss(6, 30, 6))
    assert second.prefix_miss is None
    simulation.add([*range(11), 33], max_tokens=1, prompt_logprobs=0)
    assert simulation.run()["r3"][0].prefix_miss is None  # it was not looked for
    simulation.add([*range(6), 30, 31, 33], max_tokens=1)
    assert simulation.run()["r4"][0].prefix_miss is None  # found whole, but for the tokens that fill no block
