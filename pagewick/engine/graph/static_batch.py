"""StaticBatch: the memory on a GPU from which captured steps read their batch, padded to one of few sizes.

Padding consists of further sequences, of tokens 0 from position 0 on. Their keys and values go to the null block of
each cache group, which belongs to no sequence, and they see nothing else. Rows of a batch do not depend on each other;
so padding changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.device_copies import Array, lay_out
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.step_memory import GRAPH_TOKENS
from pagewick.engine.streams import DeviceStream, Event

# Tables of blocks have room for at least this number of tokens, whatever the context; then it grows by factors of two.
_LEAST_CONTEXT = 512
# Sampling sends at most this number of arrays along, of numbers of at most 8 bytes.
_MAX_EXTRAS = 6
# Pieces of host memory: one is packed while the device may still read the other.
_NUM_PIECES = 2

_Kind = tuple[tuple[int, ...], np.dtype[Any]]


class PaddedSize(NamedTuple):
    """context_len: the number of tokens for which the block tables have room."""

    num_tokens: int
    num_seqs: int
    context_len: int


def padded_number(number: int) -> int:
    """Return the next of the numbers 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, ...: four up to each power of two."""
    step = 1 << max(0, (number - 1).bit_length() - 3)
    return -(-number // step) * step


@dataclass(frozen=True, slots=True)
class _Layout:
    """The arrays of a padded batch: on the device, and in each piece of host memory."""

    num_bytes: int
    tensors: list[Tensor]
    arrays: list[list[Array]]


class StaticBatch:
    """Memory on a device for the largest batch that is captured; other batches use its beginning.

    A batch is packed into pinned host memory and copied at once. There are two pieces of host memory, which take turns,
    so that a batch can be packed while the batch before it has not been copied yet.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        null_blocks: Sequence[int],
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        stream: DeviceStream,
    ) -> None:
        """null_blocks: the block of each cache group that belongs to no sequence."""
        self._specs = list(specs)
        self._null_blocks = list(null_blocks)
        self._max_model_len = max_model_len
        self._stream = stream
        largest = PaddedSize(GRAPH_TOKENS, padded_number(max_num_seqs + 1), max_model_len)
        extras = [np.dtype(np.int64)] * _MAX_EXTRAS
        _, num_bytes = lay_out(self._kinds(largest, extras, has_sources=True, has_adapters=True))
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pieces = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_PIECES)]
        self._copied: list[Event | None] = [None] * _NUM_PIECES
        self._turn = 0
        self._layouts: dict[tuple[PaddedSize, tuple[np.dtype[Any], ...], bool], _Layout] = {}

    def size_for(self, batch: HostBatch) -> PaddedSize:
        """Return the size to which a batch is padded. Every token of padding belongs to a sequence of padding."""
        num_tokens, num_seqs = len(batch.input_ids), len(batch.context_lens)
        padded_seqs = padded_number(num_seqs)
        if padded_seqs == num_seqs and padded_number(num_tokens) > num_tokens:
            padded_seqs = padded_number(num_seqs + 1)
        padded_tokens = padded_number(num_tokens + padded_seqs - num_seqs)
        context_len = max(_LEAST_CONTEXT, int(batch.context_lens.max()))
        return PaddedSize(padded_tokens, padded_seqs, 1 << (context_len - 1).bit_length())

    def write(self, batch: HostBatch, size: PaddedSize) -> list[Tensor]:
        """Queue a copy of the batch, padded, to the device; return its arrays there, ordered as in HostBatch.arrays."""
        layout = self._layout(batch, size)
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_PIECES
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        self._pad(batch, layout.arrays[turn])
        self._memory[: layout.num_bytes].copy_(self._pieces[turn][: layout.num_bytes], non_blocking=True)
        self._copied[turn] = self._stream.record_event()
        return layout.tensors

    def _layout(self, batch: HostBatch, size: PaddedSize) -> _Layout:
        extras, has_adapters = tuple(extra.dtype for extra in batch.extras), batch.adapter_ids is not None
        key = size, extras, has_adapters
        if key not in self._layouts:
            has_sources = batch.last_sampled is not None
            places, num_bytes = lay_out(self._kinds(size, extras, has_sources=has_sources, has_adapters=has_adapters))
            self._layouts[key] = _Layout(
                num_bytes,
                [place.of_tensor(self._memory) for place in places],
                [[place.of_array(piece.numpy()) for place in places] for piece in self._pieces],
            )
        return self._layouts[key]

    def _kinds(
        self, size: PaddedSize, extras: Sequence[np.dtype[Any]], *, has_sources: bool, has_adapters: bool
    ) -> list[_Kind]:
        """Return the shapes and dtypes of a padded batch's arrays, ordered as in HostBatch.arrays."""
        long, short = np.dtype(np.int64), np.dtype(np.int32)
        num_tokens, num_seqs, context_len = size
        context_len = max(_LEAST_CONTEXT, min(context_len, self._max_model_len))
        return [
            ((num_tokens,), long),
            ((1, num_tokens), long),
            ((num_seqs + 1,), short),
            ((num_seqs,), short),
            *(((num_tokens,), long) for _ in self._specs),
            *(((num_seqs, spec.table_width(context_len)), short) for spec in self._specs),
            *(((num_seqs,), dtype) for dtype in extras),
            *[((num_tokens,), long)] * has_sources,
            *[((num_tokens,), short)] * has_adapters,
        ]

    def _pad(self, batch: HostBatch, padded: Sequence[Array]) -> None:
        """Write the batch's arrays into larger ones, and fill the rest with padding."""
        tables = [
            # A row of states begins and ends with the null block, and stores the state after all of its tokens.
            np.array([block, block, 0]) if spec.has_snapshots else block
            for block, spec in zip(self._null_blocks, self._specs, strict=True)
        ]
        slots = [
            block if spec.has_snapshots else block * spec.block_size
            for block, spec in zip(self._null_blocks, self._specs, strict=True)
        ]
        # The last element of last_sampled.token_ids belongs to no slot.
        no_slot = [] if batch.last_sampled is None else [len(batch.last_sampled.token_ids) - 1]
        # Padding has the adapter of any sequence: its results are not read.
        adapter = [] if batch.adapter_ids is None else [batch.adapter_ids[0]]
        fills: list[Any] = [0, 0, 0, 0, *slots, *tables, *[0] * len(batch.extras), *no_slot, *adapter]
        for target, fill, array in zip(padded, fills, batch.arrays(), strict=True):
            target[...] = fill
            # A table may be wider than the context is long: blocks for draft tokens to come, or of rejected ones.
            kept = tuple(slice(min(lengths)) for lengths in zip(target.shape, array.shape, strict=True))
            target[kept] = array[kept]
        num_tokens, num_seqs = len(batch.input_ids), len(batch.context_lens)
        cu_seqlens_q, context_lens = padded[2], padded[3]
        # Each sequence of padding has a token, and the last one has the rest.
        cu_seqlens_q[num_seqs + 1 :] = np.arange(num_tokens + 1, num_tokens + len(context_lens) - num_seqs + 1)
        cu_seqlens_q[-1] = len(padded[0])
        context_lens[num_seqs:] = np.diff(cu_seqlens_q[num_seqs:])
