"""Several ranks in one process, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from pagewick.attention.native import NativeBackend
from pagewick.layers.context import LayerContext
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.unquantized import UnquantizedMethod

BLOCK_SIZE = 4

_Result = TypeVar("_Result")


class ThreadCollectives(Collectives):
    """The Collectives of one rank in a group of threads."""

    def __init__(self, rank: int, world_size: int, barrier: Barrier, board: list[Tensor]) -> None:
        super().__init__(rank, world_size)
        self._barrier = barrier
        self._board = board

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(dim=0)

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        parts = self._exchange(tensor)
        assert [part.shape[dim] for part in parts] == list(sizes or [tensor.shape[dim]] * self.world_size)
        return torch.cat(parts, dim)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(timeout=60)
        parts = list(self._board)
        self._barrier.wait(timeout=60)
        return parts


def layer_context(collectives: Collectives) -> LayerContext:
    return LayerContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        collectives=collectives,
        backend=NativeBackend(BLOCK_SIZE, "float32"),
        choose_method=lambda prefix: UnquantizedMethod(),
        max_model_len=512,
    )


def single_context() -> LayerContext:
    return layer_context(Collectives.single())


def on_ranks(world_size: int, act: Callable[[LayerContext], _Result]) -> list[_Result]:
    """Return the result of `act` on each rank of a group of `world_size`."""
    barrier, board = Barrier(world_size), [torch.empty(0)] * world_size
    contexts = [
        layer_context(ThreadCollectives(rank, world_size, barrier, board) if world_size > 1 else Collectives.single())
        for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(act, contexts))
