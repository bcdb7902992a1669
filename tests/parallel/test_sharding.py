"""For every size, shards cover a dimension, and a rank stores the KV heads that its query heads need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import ConfigError
from pagewick.parallel.sharding import (
    check_tensor_parallel,
    kept_key_heads,
    kv_heads_of_rank,
    shard_bounds,
    shard_sizes,
)


@given(size=st.integers(0, 5000), world_size=st.integers(1, 17), multiple=st.integers(1, 300))
def test_shards_cover_the_dimension_in_order(size: int, world_size: int, multiple: int) -> None:
    bounds = [shard_bounds(size, rank, world_size, multiple) for rank in range(world_size)]
    covered = [index for start, stop in bounds for index in range(start, stop)]
    assert covered == list(range(size))
    assert all(start % multiple == 0 or start == size for start, _ in bounds)
    assert [stop - start for start, stop in bounds] == shard_sizes(size, world_size, multiple)


@given(num_units=st.integers(0, 400), world_size=st.integers(1, 17), multiple=st.integers(1, 64))
def test_shards_differ_by_at_most_one_unit(num_units: int, world_size: int, multiple: int) -> None:
    sizes = shard_sizes(num_units * multiple, world_size, multiple)
    assert max(sizes) - min(sizes) <= multiple
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("size", "world_size", "multiple", "expected"),
    [
        (10, 3, 1, [4, 3, 3]),
        (768, 3, 256, [256, 256, 256]),
        (1024, 3, 256, [512, 256, 256]),
        (1000, 2, 256, [512, 488]),
        (256, 2, 256, [256, 0]),
        (7, 1, 4, [7]),
    ],
)
def test_known_shards(size: int, world_size: int, multiple: int, expected: list[int]) -> None:
    assert shard_sizes(size, world_size, multiple) == expected


@st.composite
def head_counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw (query heads, KV heads, ranks) of a model that the ranks can share."""
    world_size = draw(st.integers(1, 12))
    num_heads = world_size * draw(st.integers(1, 24))
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    return num_heads, draw(st.sampled_from(divisors)), world_size


@given(head_counts())
def test_every_query_head_finds_its_kv_head(counts: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, world_size = counts
    num_local_heads = num_heads // world_size
    for rank in range(world_size):
        stored = kv_heads_of_rank(num_heads, num_kv_heads, rank, world_size)
        assert num_local_heads % len(stored) == 0
        ratio = num_local_heads // len(stored)
        for local_head in range(num_local_heads):
            head = rank * num_local_heads + local_head
            assert stored[local_head // ratio] == head * num_kv_heads // num_heads


@given(head_counts())
def test_no_copies_where_kv_heads_can_be_divided(counts: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, world_size = counts
    stored = [kv_heads_of_rank(num_heads, num_kv_heads, rank, world_size) for rank in range(world_size)]
    if num_kv_heads % world_size == 0:
        assert [head for heads in stored for head in heads] == list(range(num_kv_heads))
    elif world_size % num_kv_heads == 0:
        assert [len(heads) for heads in stored] == [1] * world_size


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((8, 2, 0, 2), [0]),
        ((8, 8, 1, 2), [4, 5, 6, 7]),
        ((8, 2, 3, 4), [1]),
        # Three ranks of 4 heads, groups of 3: rank 1 has heads 4..7, which read KV heads 1 1 2 2.
        ((12, 4, 1, 3), [1, 1, 2, 2]),
        # Two ranks of 6 heads, groups of 4: pairs of heads share, so 3 stored heads suffice.
        ((12, 3, 0, 2), [0, 0, 1]),
    ],
)
def test_known_kv_heads(counts: tuple[int, int, int, int], expected: list[int]) -> None:
    assert kv_heads_of_rank(*counts) == expected


@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_rank_keeps_the_key_heads_that_its_query_heads_read(
    group: int, num_kv_heads: int, data: st.DataObject
) -> None:
    num_heads = group * num_kv_heads
    num_ranks = data.draw(st.integers(1, num_heads))
    for rank in range(num_ranks):
        read = {head // group for head in range(*shard_bounds(num_heads, rank, num_ranks))}
        assert list(range(*kept_key_heads(num_heads, num_kv_heads, rank, num_ranks))) == sorted(read)


def test_check_tensor_parallel_names_the_sizes_that_work() -> None:
    check_tensor_parallel(6, 3)
    with pytest.raises(ConfigError, match=r"size 4 .* 6 attention heads; sizes that work: 1, 2, 3, 6$"):
        check_tensor_parallel(6, 4)
