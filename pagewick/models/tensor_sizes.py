"""The sizes of a model's tensors, and the roles that tensors have. Imports no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pagewick.parallel.sharding import shard_bounds

Role = Literal[
    "embedding", "head", "labels", "norm", "attention", "state", "mlp", "router", "expert", "shared_expert", "vision"
]  # fmt: skip


class Size(NamedTuple):
    """A dimension of a tensor, and how much of it the rank keeps."""

    whole: int
    kept: int

    def times(self, number: int) -> Size:
        return Size(self.whole * number, self.kept * number)

    def plus(self, other: Size) -> Size:
        return Size(self.whole + other.whole, self.kept + other.kept)


def whole(size: int) -> Size:
    """Return a dimension that every rank keeps."""
    return Size(size, size)


def cut(size: int, rank: int, num_ranks: int) -> Size:
    """Return a dimension that is shared out over the ranks."""
    start, stop = shard_bounds(size, rank, num_ranks)
    return Size(size, stop - start)
