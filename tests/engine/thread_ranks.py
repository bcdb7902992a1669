"""Ranks that are threads of the test, for what they tell each other through the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, TypeVar

from pagewick.parallel.collectives import Collectives

Result = TypeVar("Result")

# If a rank waits longer than this, another one does not take part. No test waits that long unless it fails.
_TIMEOUT_S = 60.0


class _Board:
    """Where ranks leave values: by the number of the exchange, and by rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._values: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._news = Condition()
        self._is_rank_lost = False

    def exchange(self, number: int, rank: int, value: Any) -> list[Any]:
        values = self._values[number]
        with self._news:
            values[rank] = value
            self._news.notify_all()
            self._news.wait_for(lambda: len(values) == self.world_size or self._is_rank_lost, _TIMEOUT_S)
        if len(values) < self.world_size:
            raise RuntimeError("another rank is lost")
        return [values[other] for other in range(self.world_size)]

    def lose_rank(self) -> None:
        with self._news:
            self._is_rank_lost = True
            self._news.notify_all()


class ThreadRank(Collectives):
    """The Collectives of one of several threads; tensors cannot be exchanged. num_minima: the calls of minimum."""

    def __init__(self, rank: int, board: _Board, local_world_size: int | None = None) -> None:
        super().__init__(rank, board.world_size, local_world_size=local_world_size)
        self._board = board
        self._num_exchanges = 0
        self.num_minima = 0

    def minimum(self, values: Sequence[int]) -> list[int]:
        """As Collectives.minimum."""
        self.num_minima += 1
        return [min(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def total(self, values: Sequence[int]) -> list[int]:
        """As Collectives.total."""
        return [sum(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """As Collectives.broadcast_bytes."""
        found: bytes = self._exchange(payload)[0]
        return found

    def barrier(self) -> None:
        """As Collectives.barrier."""
        self._exchange(None)

    def _exchange(self, value: Any) -> list[Any]:
        self._num_exchanges += 1
        return self._board.exchange(self._num_exchanges, self.rank, value)


def on_ranks(
    world_size: int, run: Callable[[ThreadRank], Result], machines: Sequence[int] | None = None
) -> list[Result | Exception]:
    """Call `run` in a thread for each rank; return the results, or the exceptions, in their order.

    machines: the number of ranks of each; None: all ranks are on one.
    """
    local_sizes = [size for size in machines or [world_size] for _ in range(size)]
    board = _Board(world_size)

    def call(rank: int) -> Result | Exception:
        try:
            return run(ThreadRank(rank, board, local_sizes[rank]))
        except Exception as error:
            board.lose_rank()
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(call, range(world_size)))
