"""CUDA graphs: the forward pass of small steps, captured once for each padded size and then replayed with one call.

A step with one token of each sequence, or a few, keeps a GPU busy for less time than the host needs to start its
hundreds of kernels one by one. Prompts do not, and have too many sizes; they run eagerly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.forward import ForwardOutput, ForwardStage, forward, output_of, run
from pagewick.engine.graph.static_batch import PaddedSize, StaticBatch
from pagewick.engine.slots import Batch, HostBatch
from pagewick.engine.step_memory import GRAPH_TOKENS, MAX_GRAPHS
from pagewick.engine.streams import DeviceStream, Graph
from pagewick.log import get_logger
from pagewick.models.decoder import Decoder

logger = get_logger(__name__)

# Sequences with more new tokens than this are prompts. Steps of decoding have one, plus draft tokens.
MAX_QUERY_LEN = 17

_Key = tuple[PaddedSize, ForwardStage, int]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph that reads from the static batch and writes to `results`. extras: those of the static batch."""

    graph: Graph
    results: Sequence[Tensor]
    extras: Sequence[Tensor]


class CapturedSteps:
    """A model on a GPU and the graphs of its steps. Not thread-safe.

    The first step of a size runs eagerly, which compiles kernels and finds out whether anything makes the host wait for
    the GPU; the second is captured.
    MAX_GRAPHS graphs are kept; the least recently used one goes first.
    """

    def __init__(self, model: Decoder, static: StaticBatch, device: torch.device, stream: DeviceStream) -> None:
        self._model = model
        self._static = static
        self._device = device
        self._stream = stream
        self._is_on = True
        self._seen: set[_Key] = set()
        self._graphs: OrderedDict[_Key, _Captured] = OrderedDict()

    def __call__(self, batch: HostBatch, stage: ForwardStage) -> ForwardOutput:
        """Return forward(model, batch, stage). The next call overwrites the result, in the order of the stream."""
        size = self._static.size_for(batch)
        if not (self._is_on and size.num_tokens <= GRAPH_TOKENS and _has_short_queries(batch)):
            return run(self._model, batch.to(self._device), stage)
        key = size, stage, len(batch.extras)
        tensors = self._static.write(batch, size)
        if found := self._graphs.get(key):
            self._graphs.move_to_end(key)
            found.graph.replay()
        elif key in self._seen:
            found = self._capture(batch, tensors, key)
        if found is not None:
            return _first_rows(batch, found.results, found.extras)
        self._seen.add(key)
        return self._try(batch, tensors, stage)

    def _try(self, batch: HostBatch, tensors: Sequence[Tensor], stage: ForwardStage) -> ForwardOutput:
        """Run a step eagerly, padded as it will be when it is captured."""
        if not self._is_on:
            return run(self._model, batch.to(self._device), stage)
        try:
            with self._stream.refuse_waits():
                padded = batch.on_device(tensors)
                return _first_rows(batch, forward(self._model, padded, stage), padded.extras)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            # Graphs are not the cause, and the GPU may not be able to repeat the step.
            raise
        except RuntimeError as error:
            self._turn_off(error)
        return run(self._model, batch.to(self._device), stage)

    def _capture(self, batch: HostBatch, tensors: Sequence[Tensor], key: _Key) -> _Captured | None:
        """Capture a step and run it; None if it cannot be captured."""
        padded: list[Batch] = []

        def step() -> Sequence[Tensor]:
            padded.append(batch.on_device(tensors))
            return forward(self._model, padded[0], key[1])

        try:
            results, graph = self._stream.capture(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._turn_off(error)
            return None
        found = self._graphs[key] = _Captured(graph, results, padded[0].extras)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        graph.replay()
        return found

    def _turn_off(self, error: RuntimeError) -> None:
        self._is_on = False
        self._graphs.clear()
        logger.warning("steps are slower, since CUDA graphs cannot hold them: %s", str(error).partition("\n")[0])


def _has_short_queries(batch: HostBatch) -> bool:
    """Whether no sequence has a prompt in this batch. A step with an image is long and comes once for each image."""
    return batch.is_text and int(np.diff(batch.cu_seqlens_q).max()) <= MAX_QUERY_LEN


def _first_rows(batch: HostBatch, results: Sequence[Tensor], extras: Sequence[Tensor]) -> ForwardOutput:
    """Return results and extras without the rows of padding."""
    kept = [extra[: len(batch.context_lens)] for extra in extras]
    return output_of([result[: len(batch.input_ids)] for result in results], kept)
