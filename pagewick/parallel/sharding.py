"""The part of a dimension and the heads that a rank of a tensor-parallel group holds. Plain integers."""

from __future__ import annotations

from math import gcd

from pagewick.errors import ConfigError


def shard_bounds(size: int, tp_rank: int, tp_size: int, multiple: int = 1) -> tuple[int, int]:
    """Return the contiguous range [start, stop) of `range(size)` that belongs to `tp_rank`.

    Shards follow each other in rank order and begin at multiples of `multiple` (the unit that must not be
    cut, such as a quantization group); their lengths differ by at most one unit, longer ones first. The last
    one may end in a partial unit; with fewer units than ranks, the last ranks get nothing.
    """
    num_units = -(-size // multiple)
    base, remainder = divmod(num_units, tp_size)
    first = tp_rank * base + min(tp_rank, remainder)
    last = first + base + (tp_rank < remainder)
    return min(first * multiple, size), min(last * multiple, size)


def shard_sizes(size: int, tp_size: int, multiple: int = 1) -> list[int]:
    """Return the length of every rank's shard, for `Collectives.all_gather`."""
    bounds = (shard_bounds(size, tp_rank, tp_size, multiple) for tp_rank in range(tp_size))
    return [stop - start for start, stop in bounds]


def kv_heads_of_rank(total_num_heads: int, total_num_kv_heads: int, tp_rank: int, tp_size: int) -> list[int]:
    """Return the ids of the KV heads that `tp_rank` stores, in storage order; an id may repeat.

    The rank computes `n = total_num_heads / tp_size` query heads, `[tp_rank * n, (tp_rank + 1) * n)`, and head h
    reads KV head `h // g` with `g = total_num_heads / total_num_kv_heads`. Attention needs one ratio for all
    stored heads: local query head i reads stored head `i // (n / len(result))`. Cutting the query heads into
    runs of gcd(n, g) gives the smallest number of stored heads that allows it: a contiguous range without copies if g
    divides n, a single head if n divides g, and otherwise some heads are stored more than once.
    """
    num_local_heads = total_num_heads // tp_size
    group = total_num_heads // total_num_kv_heads
    first = tp_rank * num_local_heads
    return [head // group for head in range(first, first + num_local_heads, gcd(num_local_heads, group))]


def kept_key_heads(num_heads: int, num_kv_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return the contiguous range of KV heads that the query heads of a rank read, where no cache keeps them.

    The ranks' numbers of query heads may then differ by one, and there are at most as many ranks as query heads. Head h
    reads KV head `h // (num_heads / num_kv_heads)`.
    """
    start, stop = shard_bounds(num_heads, tp_rank, tp_size)
    group = num_heads // num_kv_heads
    return start // group, -(-stop // group)


def check_tensor_parallel(
    total_num_heads: int, tp_size: int, owner: str = "model", parts: str = "attention heads"
) -> None:
    """Raise ConfigError, naming the sizes that work, unless every rank gets the same number of `parts` of `owner`."""
    if tp_size < 1 or total_num_heads % tp_size:
        sizes = ", ".join(str(size) for size in range(1, total_num_heads + 1) if total_num_heads % size == 0)
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} does not divide the {owner}'s {total_num_heads} {parts};"
            f" sizes that work: {sizes}"
        )
