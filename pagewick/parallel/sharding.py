"""Which part of a dimension, and which heads, a rank holds. Plain integers."""

from __future__ import annotations

from math import gcd

from pagewick.errors import ConfigError


def shard_bounds(size: int, rank: int, world_size: int, multiple: int = 1) -> tuple[int, int]:
    """The contiguous range [start, stop) of `range(size)` that belongs to `rank`.

    Shards follow each other in rank order and begin at multiples of `multiple` (the unit that must not be
    cut, such as a quantization group); their lengths differ by at most one unit, longer ones first. The last
    one may end in a partial unit; with fewer units than ranks, late ranks get nothing.
    """
    num_units = -(-size // multiple)
    base, remainder = divmod(num_units, world_size)
    first = rank * base + min(rank, remainder)
    last = first + base + (rank < remainder)
    return min(first * multiple, size), min(last * multiple, size)


def shard_sizes(size: int, world_size: int, multiple: int = 1) -> list[int]:
    """The length of every rank's shard, as `Collectives.all_gather` wants it."""
    bounds = (shard_bounds(size, rank, world_size, multiple) for rank in range(world_size))
    return [stop - start for start, stop in bounds]


def kv_heads_of_rank(total_num_heads: int, total_num_kv_heads: int, rank: int, world_size: int) -> list[int]:
    """Ids of the KV heads that `rank` stores, in storage order; an id may repeat.

    The rank computes `n = total_num_heads / world_size` query heads, `[rank * n, (rank + 1) * n)`, and head h
    reads KV head `h // g` with `g = total_num_heads / total_num_kv_heads`. Attention wants one ratio for all
    stored heads: local query head i reads stored head `i // (n / len(result))`. Cutting the query heads into
    runs of gcd(n, g) gives the fewest heads that allow it: a contiguous range without copies where g divides
    n, a single head where n divides g, and otherwise some heads stored more than once.
    """
    num_local_heads = total_num_heads // world_size
    group = total_num_heads // total_num_kv_heads
    first = rank * num_local_heads
    return [head // group for head in range(first, first + num_local_heads, gcd(num_local_heads, group))]


def check_tensor_parallel(total_num_heads: int, world_size: int) -> None:
    """Raises ConfigError, naming the sizes that work, unless every rank gets the same number of heads."""
    if world_size < 1 or total_num_heads % world_size:
        sizes = ", ".join(str(size) for size in range(1, total_num_heads + 1) if total_num_heads % size == 0)
        raise ConfigError(
            f"--tensor-parallel-size {world_size} does not divide the model's {total_num_heads} attention"
            f" heads; sizes that work: {sizes}"
        )
