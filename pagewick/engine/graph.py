"""The forward pass of small steps, recorded once for each size and then replayed with a single call.

A step of few tokens does little work in many operations, so that most of its time would go into calling them. Sizes are
the numbers of tokens and of sequences; everything else of a batch may differ from step to step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagewick.attention.backend import GroupBatch
from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.progress import Progress
from pagewick.engine.slots import Batch
from pagewick.kernels import recording
from pagewick.log import get_logger
from pagewick.parallel.collectives import Collectives

logger = get_logger(__name__)

# Steps of more tokens spend their time in the operations.
MAX_TOKENS = 64
# Recordings kept; the least recently used goes first.
MAX_RECORDINGS = 64


def step_graph(
    model: nn.Module,
    specs: Sequence[CacheSpec],
    max_model_len: int,
    device: torch.device,
    collectives: Collectives,
    progress: Progress,
) -> Callable[[Batch], Tensor]:
    """The model's forward, recorded where it can be; specs: of the batch's cache groups.

    progress: is marked after every operation that is replayed.
    """
    # What ranks say to each other is no operation that could be recorded.
    if collectives.world_size > 1 or not recording.can_record(device):
        return model
    return StepGraph(model, [spec.num_blocks(max_model_len) for spec in specs], progress)


class StepGraph:
    """A model on a CPU and its recordings. Not for several threads at once.

    max_blocks: of a sequence, per cache group.
    """

    def __init__(self, model: nn.Module, max_blocks: Sequence[int], progress: Progress) -> None:
        self._model = model
        # The record must stay where it is as long as its address is used.
        self._progress = progress
        self._progress_count = progress.count_address()
        self._is_on = True
        self._seen: set[tuple[int, int]] = set()
        self._results = recording.TapeMemory()
        self._recorded: OrderedDict[tuple[int, int], _Recorded] = OrderedDict()
        self._memory = _batch_memory(max_blocks)

    def __call__(self, batch: Batch) -> Tensor:
        """model(batch). The result is overwritten by the next call."""
        num_tokens, num_seqs = len(batch.input_ids), len(batch.context_lens)
        if not self._is_on or num_tokens > MAX_TOKENS:
            return self._model(batch)  # type: ignore[no-any-return]
        size = num_tokens, num_seqs
        if found := self._recorded.get(size):
            self._recorded.move_to_end(size)
            _copy(batch, found.batch)
            return found.recording.replay(self._progress_count)
        # To record is slower than to run: not for a size that comes once.
        if size not in self._seen:
            self._seen.add(size)
            return self._model(batch)  # type: ignore[no-any-return]
        return self._record(batch, size)

    def _record(self, batch: Batch, size: tuple[int, int]) -> Tensor:
        own = _part_of(self._memory, *size)
        _copy(batch, own)
        result, recorded = recording.record(lambda: self._model(own), self._results)
        if isinstance(recorded, str):
            logger.debug("steps are not recorded: the model uses %s", recorded)
            self._is_on = False
            return result
        self._recorded[size] = _Recorded(own, recorded)
        if len(self._recorded) > MAX_RECORDINGS:
            self._recorded.popitem(last=False)
        return result


@dataclass(frozen=True, slots=True)
class _Recorded:
    """batch: where the recording reads."""

    batch: Batch
    recording: recording.Recording


def _batch_memory(max_blocks: Sequence[int]) -> Batch:
    """The largest batch that is recorded; all others are the beginnings of its tensors."""
    return Batch(
        input_ids=torch.zeros(MAX_TOKENS, dtype=torch.int64),
        positions=torch.zeros(1, MAX_TOKENS, dtype=torch.int64),
        cu_seqlens_q=torch.zeros(MAX_TOKENS + 1, dtype=torch.int32),
        context_lens=torch.zeros(MAX_TOKENS, dtype=torch.int32),
        groups=[
            GroupBatch(
                torch.zeros(MAX_TOKENS, dtype=torch.int64), torch.zeros(MAX_TOKENS, max(1, count), dtype=torch.int32)
            )
            for count in max_blocks
        ],
    )


def _part_of(memory: Batch, num_tokens: int, num_seqs: int) -> Batch:
    return Batch(
        input_ids=memory.input_ids[:num_tokens],
        positions=memory.positions[:, :num_tokens],
        cu_seqlens_q=memory.cu_seqlens_q[: num_seqs + 1],
        context_lens=memory.context_lens[:num_seqs],
        groups=[GroupBatch(one.slot_mapping[:num_tokens], one.block_tables[:num_seqs]) for one in memory.groups],
    )


def _copy(source: Batch, target: Batch) -> None:
    target.input_ids.copy_(source.input_ids)
    target.positions.copy_(source.positions)
    target.cu_seqlens_q.copy_(source.cu_seqlens_q)
    target.context_lens.copy_(source.context_lens)
    for ours, theirs in zip(target.groups, source.groups, strict=True):
        ours.slot_mapping.copy_(theirs.slot_mapping)
        ours.block_tables[:, : theirs.block_tables.shape[1]].copy_(theirs.block_tables)
