"""CUDA graphs: the forward pass of small steps, captured once for each padded size and then replayed with one call.

A step with one token of each sequence, or a few, keeps a GPU busy for less time than the host needs to start its
hundreds of kernels one by one. Prompts do not, and have too many sizes; they run eagerly.

All ranks capture the same steps or none: NCCL pairs the operations of ranks by their order, so a rank that repeats a
step alone would get other sums, or none. The ranks ask each other in the first step of a size and when it is captured,
through the host. Replays ask nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.forward import ForwardOutput, ForwardStage, StepModel, forward, output_of, run
from pagewick.engine.graph.static_batch import PaddedSize, StaticBatch
from pagewick.engine.host_batch import Batch, HostBatch
from pagewick.engine.step_memory import GRAPH_TOKENS, MAX_GRAPHS
from pagewick.engine.streams import DeviceStream, Graph
from pagewick.errors import EngineDeadError
from pagewick.log import get_logger
from pagewick.parallel.collectives import Collectives

logger = get_logger(__name__)

# Sequences with more new tokens than this are prompts. Steps of decoding have one, plus draft tokens.
MAX_QUERY_LEN = 17

# How far the forward pass goes, the number of extras, and whether sequences have adapters.
_Key = tuple[PaddedSize, ForwardStage, int, bool]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph that reads from the static batch and writes to `results`. extras: those of the static batch."""

    graph: Graph
    results: Sequence[Tensor]
    extras: Sequence[Tensor]


class CapturedSteps:
    """A model on a GPU and the graphs of its steps. Not thread-safe.

    The first step of a size runs eagerly, which compiles kernels and finds out whether anything makes the host wait for
    the GPU; the second is captured. If one of the two fails, on any rank, all steps run eagerly from then on.
    MAX_GRAPHS graphs are kept; the least recently used one goes first.
    collectives: all ranks; each must call this with the same steps. may_repeat: whether a step that has failed in the
    middle can run again; if not, the first step of a size may make the host wait, and capturing finds that out.
    """

    def __init__(
        self,
        model: StepModel,
        static: StaticBatch,
        device: torch.device,
        stream: DeviceStream,
        collectives: Collectives,
        *,
        may_repeat: bool = True,
    ) -> None:
        self._collectives = collectives
        self._may_repeat = may_repeat
        self._model = model
        self._static = static
        self._device = device
        self._stream = stream
        self._is_on = True
        self._seen: set[_Key] = set()
        self._graphs: OrderedDict[_Key, _Captured] = OrderedDict()

    def __call__(self, batch: HostBatch, stage: ForwardStage) -> ForwardOutput:
        """Return forward(model, batch, stage). The next call overwrites the result, in the order of the stream.

        Raises EngineDeadError if a step of a new size fails on some ranks only; no step may follow.
        """
        size = self._static.size_for(batch)
        if not (self._is_on and size.num_tokens <= GRAPH_TOKENS and _has_short_queries(batch)):
            return run(self._model, batch.to(self._device), stage)
        key = size, stage, len(batch.extras), batch.adapter_ids is not None
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
        if not self._may_repeat:
            return self._run_padded(batch, tensors, stage)
        output: ForwardOutput | None = None
        problem: RuntimeError | None = None
        try:
            with self._stream.refuse_waits():
                output = self._run_padded(batch, tensors, stage)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            # Graphs are not the cause, and the GPU may not be able to repeat the step.
            raise
        except RuntimeError as error:
            problem = error
        if self._all_succeed(problem) and output is not None:
            return output
        self._turn_off(_first_line(problem))
        return run(self._model, batch.to(self._device), stage)

    def _run_padded(self, batch: HostBatch, tensors: Sequence[Tensor], stage: ForwardStage) -> ForwardOutput:
        padded = batch.on_device(tensors)
        return _first_rows(batch, forward(self._model, padded, stage), padded.extras)

    def _all_succeed(self, problem: RuntimeError | None) -> bool:
        """Whether an eager step has succeeded on every rank; every rank must call this. problem: why not on this one.

        If it failed on all, all may repeat it: they run the same code, and have failed at the same operation. If it
        failed on some, the others have queued operations of NCCL that nobody joins: this raises EngineDeadError.
        """
        is_failed = int(problem is not None)
        lowest, negative_highest = self._collectives.minimum([is_failed, -is_failed])
        if lowest == -negative_highest:
            return problem is None
        reason = _first_line(problem) if problem is not None else "another rank's log says why"
        raise EngineDeadError(
            f"only some ranks could run a step that CUDA graphs would hold: {reason}; give --enforce-eager"
        ) from problem

    def _capture(self, batch: HostBatch, tensors: Sequence[Tensor], key: _Key) -> _Captured | None:
        """Capture a step and run it; None if some rank cannot capture it."""
        padded: list[Batch] = []
        found: _Captured | None = None
        reason = "another rank cannot capture this step"

        def step() -> Sequence[Tensor]:
            padded.append(batch.on_device(tensors))
            return forward(self._model, padded[0], key[1])

        try:
            results, graph = self._stream.capture(step)
            found = _Captured(graph, results, padded[0].extras)
        except RuntimeError as error:
            # Also too little memory: the eager step of this size had enough, without a pool for graphs.
            reason = _first_line(_cause(error))
        # Nothing has run yet on any GPU, so all ranks can still run this step eagerly.
        (is_captured_everywhere,) = self._collectives.minimum([int(found is not None)])
        if found is None or not is_captured_everywhere:
            self._turn_off(reason)
            return None
        self._graphs[key] = found
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        found.graph.replay()
        return found

    def _turn_off(self, reason: str) -> None:
        self._is_on = False
        if self._graphs:
            # The step before may still run one of them.
            self._stream.record_event().synchronize()
            self._graphs.clear()
        logger.warning("steps are slower, since CUDA graphs cannot hold them: %s", reason)


def _first_line(error: RuntimeError | None) -> str:
    return str(error).partition("\n")[0]


def _cause(error: RuntimeError) -> RuntimeError:
    """Return the error of an operation that cannot be captured: the end of the capture then fails as well."""
    return error.__context__ if isinstance(error.__context__, RuntimeError) else error


def _has_short_queries(batch: HostBatch) -> bool:
    """Whether no sequence has a prompt in this batch. A step with an image is long and comes once for each image."""
    return batch.is_text and int(np.diff(batch.cu_seqlens_q).max()) <= MAX_QUERY_LEN


def _first_rows(batch: HostBatch, results: Sequence[Tensor], extras: Sequence[Tensor]) -> ForwardOutput:
    """Return results and extras without the rows of padding."""
    kept = [extra[: len(batch.context_lens)] for extra in extras]
    return output_of([result[: len(batch.input_ids)] for result in results], kept)
