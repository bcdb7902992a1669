"""Records the forward pass of small steps on a CPU once for each size, and then replays it with a single call.

A step of few tokens does little work in many operations, so most of its time would go into calling them. The size of a
step is its number of tokens, its number of sequences and its ForwardStage. Everything else in a batch may differ from
step to step.

The step after a steady one runs ahead: its inputs are known as soon as the tokens are, long before the scheduler has
seen them. Other threads than the engine's begin with it, and if the scheduler then asks for that step, the engine's
thread joins them. If it asks for another, nothing is lost but the work of other threads.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pagewick.engine.device_copies import Array
from pagewick.engine.forward import ForwardOutput, ForwardStage, StepModel, forward, output_of, run
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.progress import Progress
from pagewick.engine.sampling.columns import DRAW_DTYPES
from pagewick.kernels import recorded_steps
from pagewick.log import get_logger

logger = get_logger(__name__)

# Larger steps spend most of their time in the operations themselves.
MAX_TOKENS = 64
# Number of recorded steps that are kept; the least recently used one goes first.
MAX_RECORDED_STEPS = 64

_CPU = torch.device("cpu")
# Number of tokens, number of sequences, how far the forward pass goes, and whether sequences have adapters.
_Size = tuple[int, int, ForwardStage, bool]
# RecordedStep.replay or RecordedStep.resume.
_Repeat = Callable[[int, recorded_steps.NextInputs | None], None]


class StepGraph:
    """A model on a CPU and its recorded steps. Not thread-safe.

    max_blocks: entries of a sequence's block table, per cache group.
    """

    def __init__(self, model: StepModel, max_blocks: Sequence[int], progress: Progress) -> None:
        self._model = model
        # Progress must stay alive as long as its address is used.
        self._progress = progress
        self._progress_count = progress.count_address()
        self._is_on = True
        self._seen: set[_Size] = set()
        self._results = recorded_steps.StepMemory()
        self._recorded: OrderedDict[_Size, _Recorded] = OrderedDict()
        self._memory = _batch_memory(max_blocks)
        self._ahead: _Ahead | None = None
        # Other threads must not read the model once its memory is free.
        weakref.finalize(self, recorded_steps.stop_ahead)

    def __call__(self, batch: HostBatch, stage: ForwardStage) -> ForwardOutput:
        """Return forward(model, batch, stage). The next call overwrites the result.

        If the batch is steady, the stage is MOST_LIKELY or DRAWN and the step is replayed, only `token_ids` and
        `highest` may be read.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.is_for(batch, stage):
            if batch.extras:
                ahead.recorded.next_noise[:] = batch.extras[-1]
            return self._repeat(ahead.recorded, batch, ahead.recorded.step.resume)
        # Also without `ahead`: an interrupt may have come between the start of a step and the note of it.
        recorded_steps.stop_ahead()
        num_tokens, num_seqs = len(batch.input_ids), len(batch.context_lens)
        # A step with an image is long and comes once for each image; the steps after it are text again.
        if not self._is_on or num_tokens > MAX_TOKENS or not batch.is_text:
            return run(self._model, batch.to(_CPU), stage)
        size = num_tokens, num_seqs, stage, batch.adapter_ids is not None
        if found := self._recorded.get(size):
            self._recorded.move_to_end(size)
            _copy(batch, found.batch)
            return self._repeat(found, batch, found.step.replay)
        # Recording is slower than running, so a size is recorded only when it comes a second time.
        if size not in self._seen:
            self._seen.add(size)
            return run(self._model, batch.to(_CPU), stage)
        return self._record(batch, size)

    def _repeat(self, found: _Recorded, batch: HostBatch, repeat: _Repeat) -> ForwardOutput:
        """Replay or resume a recorded step, and return its output. If the batch is steady, the next step runs ahead."""
        next_inputs = found.next_inputs if batch.is_steady else None
        repeat(self._progress_count, next_inputs)
        if next_inputs is None:
            return found.output
        self._ahead = _Ahead(found, batch)
        return found.kept

    def _record(self, batch: HostBatch, size: _Size) -> ForwardOutput:
        num_tokens, num_seqs, stage, has_adapters = size
        has_draws = stage == ForwardStage.DRAWN
        own = _part_of(self._memory, num_tokens, num_seqs, has_draws=has_draws, has_adapters=has_adapters)
        _copy(batch, own)
        tensors = own.to(_CPU)
        results, recorded = recorded_steps.record(lambda: forward(self._model, tensors, stage), self._results)
        output = output_of(results)
        if isinstance(recorded, str):
            logger.debug("steps are not recorded: the model uses %s", recorded)
            self._is_on = False
            return output
        self._recorded[size] = _recorded(own, stage, recorded, output)
        if len(self._recorded) > MAX_RECORDED_STEPS:
            self._recorded.popitem(last=False)
        return output


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step. It reads from `batch` and writes to `output`.

    next_inputs: from its results to those inputs of the next step with which streams continue; None if it computes no
    tokens. kept: these tokens and their logits, where the next step does not overwrite them.
    """

    batch: HostBatch
    stage: ForwardStage
    step: recorded_steps.RecordedStep
    output: ForwardOutput
    kept: ForwardOutput
    next_inputs: recorded_steps.NextInputs | None

    @property
    def next_noise(self) -> Array:
        """The random numbers of the step after this one, at stage DRAWN. Nothing reads them while a step runs."""
        return self.batch.extras[-1]


def _recorded(
    batch: HostBatch, stage: ForwardStage, step: recorded_steps.RecordedStep, output: ForwardOutput
) -> _Recorded:
    if output.arrays is None:
        return _Recorded(batch, stage, step, output, output, None)
    token_ids, highest = output.arrays
    kept_token_ids, kept_highest = np.empty_like(token_ids), np.empty_like(highest)
    copies = [(token_ids, kept_token_ids), (highest, kept_highest), (token_ids, batch.input_ids)]
    if stage == ForwardStage.DRAWN:
        *_, noise, next_noise = batch.extras
        copies.append((next_noise, noise))
    next_inputs = recorded_steps.NextInputs(
        copies=copies,
        increments=[batch.positions, batch.context_lens, *batch.slot_mappings],
    )
    kept = replace(
        output,
        token_ids=torch.from_numpy(kept_token_ids),
        highest=torch.from_numpy(kept_highest),
        arrays=(kept_token_ids, kept_highest),
    )
    return _Recorded(batch, stage, step, output, kept, next_inputs)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that runs ahead. before: the steady batch of the step before it."""

    recorded: _Recorded
    before: HostBatch

    def is_for(self, batch: HostBatch, stage: ForwardStage) -> bool:
        """Whether this is the step's batch, and stage."""
        expected, before = self.recorded.batch, self.before
        return (
            stage == self.recorded.stage
            # Slots hands these on from one steady batch to the next.
            and batch.block_tables is before.block_tables
            and batch.cu_seqlens_q is before.cu_seqlens_q
            and batch.adapter_ids is before.adapter_ids
            and batch.is_text
            and _is_same(batch.input_ids, expected.input_ids)
            and _is_same(batch.positions, expected.positions)
            and _is_same(batch.context_lens, expected.context_lens)
            and all(map(_is_same, batch.slot_mappings, expected.slot_mappings))
            and all(map(_is_same, batch.extras[:-1], expected.extras[:-1]))
        )


def _is_same(one: Array, other: Array) -> bool:
    return one.tobytes() == other.tobytes()


def _batch_memory(max_blocks: Sequence[int]) -> HostBatch:
    """Return room for the largest batch that is recorded; other batches use the beginnings of its arrays."""
    return HostBatch(
        input_ids=np.zeros(MAX_TOKENS, np.int64),
        positions=np.zeros((1, MAX_TOKENS), np.int64),
        cu_seqlens_q=np.zeros(MAX_TOKENS + 1, np.int32),
        context_lens=np.zeros(MAX_TOKENS, np.int32),
        slot_mappings=[np.zeros(MAX_TOKENS, np.int64) for _ in max_blocks],
        block_tables=[np.zeros((MAX_TOKENS, max(1, count)), np.int32) for count in max_blocks],
        adapter_ids=np.zeros(MAX_TOKENS, np.int32),
        extras=[np.zeros(MAX_TOKENS, dtype) for dtype in DRAW_DTYPES],
    )


def _part_of(memory: HostBatch, num_tokens: int, num_seqs: int, *, has_draws: bool, has_adapters: bool) -> HostBatch:
    assert memory.adapter_ids is not None, "_batch_memory makes room"
    return HostBatch(
        input_ids=memory.input_ids[:num_tokens],
        positions=memory.positions[:, :num_tokens],
        cu_seqlens_q=memory.cu_seqlens_q[: num_seqs + 1],
        context_lens=memory.context_lens[:num_seqs],
        slot_mappings=[slots[:num_tokens] for slots in memory.slot_mappings],
        block_tables=[tables[:num_seqs] for tables in memory.block_tables],
        adapter_ids=memory.adapter_ids[:num_tokens] if has_adapters else None,
        extras=[extra[:num_seqs] for extra in memory.extras] if has_draws else [],
    )


def _copy(source: HostBatch, target: HostBatch) -> None:
    target.input_ids[:] = source.input_ids
    target.positions[:] = source.positions
    target.cu_seqlens_q[:] = source.cu_seqlens_q
    target.context_lens[:] = source.context_lens
    for ours, theirs in zip(target.slot_mappings, source.slot_mappings, strict=True):
        ours[:] = theirs
    for ours, theirs in zip(target.block_tables, source.block_tables, strict=True):
        ours[:, : theirs.shape[1]] = theirs
    if target.adapter_ids is not None:
        target.adapter_ids[:] = source.adapter_ids
    for ours, theirs in zip(target.extras, source.extras, strict=True):
        ours[:] = theirs
