"""RankLayout: the task of each rank, as data x pipeline x tensor. Imports no torch.

Tensor ranks hold shards of the same layers, pipeline ranks hold different layers, data ranks hold copies of the whole
model. Users can choose the tensor and the pipeline size; the data size is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagewick.errors import ConfigError


class Coordinates(NamedTuple):
    """A rank's index along each axis, from 0."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The number of ranks along each axis; their product is the world size.

    rank = (data * pipeline_size + pipeline) * tensor_size + tensor. The tensor axis is the innermost, because its ranks
    communicate in every layer and launchers fill one machine after the other. Raises ConfigError for a size below 1.
    """

    data_size: int = 1
    pipeline_size: int = 1
    tensor_size: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(Coordinates._fields, (self.data_size, self.pipeline_size, self.tensor_size), strict=True):
            if size < 1:
                raise ConfigError(f"the {axis} parallel size must be at least 1; got {size}")

    @property
    def world_size(self) -> int:
        return self.data_size * self.pipeline_size * self.tensor_size

    @property
    def tensor_groups(self) -> list[range]:
        """The ranks of every tensor-parallel group; each rank is in exactly one group."""
        return [range(first, first + self.tensor_size) for first in range(0, self.world_size, self.tensor_size)]

    @property
    def pipelines(self) -> list[range]:
        """The ranks of every pipeline, in the order of its layers; each rank is in exactly one pipeline."""
        size, step = self.pipeline_size * self.tensor_size, self.tensor_size
        firsts = (begin + tensor for begin in range(0, self.world_size, size) for tensor in range(step))
        return [range(first, first + size, step) for first in firsts]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank. Raises ConfigError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not one of the {self.in_words}: check RANK and WORLD_SIZE")
        others, tensor = divmod(rank, self.tensor_size)
        return Coordinates(*divmod(others, self.pipeline_size), tensor)

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError unless the layout needs exactly `world_size` ranks."""
        if world_size != self.world_size:
            raise ConfigError(f"{world_size} ranks were started, but the layout needs {self.in_words}")

    @property
    def in_words(self) -> str:
        """The sizes, for messages."""
        sizes = f"data {self.data_size} x pipeline {self.pipeline_size} x tensor {self.tensor_size}"
        return f"{self.world_size} ranks of {sizes}"


def layout_of(world_size: int, pipeline_size: int = 1) -> RankLayout:
    """Return the layout of an engine with `world_size` ranks, which share the layers of `pipeline_size` stages.

    Raises ConfigError unless every stage gets as many ranks.
    """
    if world_size % pipeline_size:
        raise ConfigError(
            f"--pipeline-parallel-size {pipeline_size} does not divide {world_size} ranks: every stage needs as many; "
            f"start a multiple of {pipeline_size}"
        )
    return RankLayout(pipeline_size=pipeline_size, tensor_size=world_size // pipeline_size)
