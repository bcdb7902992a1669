"""Statistics of layers that keep some of their experts in host memory."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from pagewick.engine.messages import EngineStats
from pagewick.log import get_logger

logger = get_logger(__name__)


@runtime_checkable
class OffloadingLayer(Protocol):
    """num_hits, num_copies: how often an expert that a step needed was on the device, and how often it was copied."""

    num_hits: int
    num_copies: int

    @property
    def num_offloaded(self) -> int: ...

    @property
    def bytes_per_expert(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...


class ExpertCache:
    """The offloading layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, OffloadingLayer)]
        if self._layers:
            logger.info(
                "%d experts of each of %d layers are in host memory, %.2f GiB of this rank's",
                self._layers[0].num_offloaded,
                len(self._layers),
                sum(layer.host_bytes for layer in self._layers) / 2**30,
            )

    def count_into(self, stats: EngineStats) -> None:
        """Set this rank's running totals."""
        stats.num_expert_hits = sum(layer.num_hits for layer in self._layers)
        stats.num_expert_copies = sum(layer.num_copies for layer in self._layers)
        stats.expert_copy_bytes = sum(layer.num_copies * layer.bytes_per_expert for layer in self._layers)

    def log_totals(self) -> None:
        """Log how many experts were found on the device and how many had to be copied."""
        stats = EngineStats()
        self.count_into(stats)
        if needed := stats.num_expert_hits + stats.num_expert_copies:
            logger.info(
                "experts: %.1f %% were on the device when they were needed, %d were copied there (%.2f GiB)",
                100 * stats.num_expert_hits / needed,
                stats.num_expert_copies,
                stats.expert_copy_bytes / 2**30,
            )
