"""The tensors of a model as the table of tensors.py lists them: their sizes and roles. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from pagewick.parallel.sharding import shard_bounds

Role = Literal[
    "embedding", "head", "labels", "norm", "attention", "state", "mlp", "router", "table", "expert", "shared_expert",
    "vision",
]  # fmt: skip
_ID_BYTES: Final = 8
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


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


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a checkpoint, and the share of it that one rank keeps.

    path: the decoder's name for it. name: the file's. kept: the shape of the share, in which a KV head that the rank
    stores twice counts twice. role: the part of the model that it belongs to; a whole vision encoder has one,
    and stays as it is in the file. A table holds whole numbers, the ids of experts.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    kept: tuple[int, ...]
    role: Role

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_kept(self) -> int:
        """Elements of the rank's share."""
        return math.prod(self.kept)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear layer, which some checkpoints store packed."""
        return len(self.shape) == 2 and self.role in ("attention", "mlp", "expert", "shared_expert")

    def kept_bytes(self, dtype: str) -> int:
        """Memory of the rank's share if weights are kept as `dtype`.

        The engine keeps some in float32, and ids as whole numbers.
        """
        if self.role == "table":
            return self.num_kept * _ID_BYTES
        return self.num_kept * DTYPE_BYTES["float32" if self.role in ("router", "state", "labels") else dtype]
