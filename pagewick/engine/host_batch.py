"""The tensors of a step: as arrays in host memory, and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewick.attention.backend import GroupBatch
from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.device_copies import Array, upload


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B sequences, ragged and flat, on the device, for one step.

    input_ids: [T] int64. positions: [P, T] int64, P = 1 or 3. cu_seqlens_q: [B + 1] int32. context_lens: [B] int32.
    groups: the cache slots of the new tokens and the block tables, per cache group.
    key_ends, window_key_ends: see AttentionBatch. token_types: see DecoderBatch.
    inputs_embeds: [T, hidden_size], embeds_mask: [T] bool, both None if all tokens are text; deep_embeds: see
        DecoderBatch. adapter_ids: [T] int32, or None if no sequence has an adapter.
    extras: those of the HostBatch.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    groups: Sequence[GroupBatch]
    inputs_embeds: Tensor | None = None
    embeds_mask: Tensor | None = None
    deep_embeds: Tensor | None = None
    key_ends: Tensor | None = None
    window_key_ends: Tensor | None = None
    token_types: Tensor | None = None
    adapter_ids: Tensor | None = None
    extras: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class LastSampled:
    """Where the tokens of a batch come from that only the device knows.

    sources: for each token, the slot that sampled it, or NO_SLOT of Slots if the host knows it; input_ids is 0 where
    the host does not. token_ids: the last token of every slot, followed by a 0.
    """

    sources: Array
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A Batch in host memory, as arrays.

    last_sampled: None if the host knows all tokens. extras: further arrays that travel with the batch, with an element
        for each sequence.
    is_steady: on a CPU, whether the step continues the sequences of the step before by a token each, the next token of
        each has a slot in the same cache block, and no sequence reports more than its tokens. If the forward pass
        chooses tokens, nothing else is then read of the results but the logits of the most likely ones.
    block_tables: [B, max_blocks] int32 per cache group. slot_mappings: [T] int64 per cache group.
    inputs_embeds, deep_embeds: tensors of the model's dtype on its device, which ImageSlots fills in for steps with
        parts of images; key_ends: [T] int32, filled in for models whose layers see images whole. positions have three
        axes (P = 3) in some of these steps; behind the last image all axes of a token are equal.
    window_key_ends: [T] int32, token_types: [T] int64, which EncoderSlots fills in, and key_ends, for encoders.
    adapter_ids: [T] int32, see LoraLayer; None if no sequence has an adapter.
    """

    input_ids: Array
    positions: Array
    cu_seqlens_q: Array
    context_lens: Array
    slot_mappings: Sequence[Array]
    block_tables: Sequence[Array]
    last_sampled: LastSampled | None = None
    inputs_embeds: Tensor | None = None
    embeds_mask: Array | None = None
    deep_embeds: Tensor | None = None
    key_ends: Array | None = None
    window_key_ends: Array | None = None
    token_types: Array | None = None
    adapter_ids: Array | None = None
    extras: Sequence[Array] = ()
    is_steady: bool = False

    @property
    def is_text(self) -> bool:
        """Whether all tokens are from the vocabulary, at positions that are single numbers, and see none later."""
        return self.inputs_embeds is None and self.key_ends is None and len(self.positions) == 1

    def arrays(self) -> list[Array]:
        """Return the arrays of the batch, in the order in which on_device takes them."""
        arrays = [self.input_ids, self.positions, self.cu_seqlens_q, self.context_lens]
        arrays += [*self.slot_mappings, *self.block_tables, *self.extras]
        arrays += [] if self.last_sampled is None else [self.last_sampled.sources]
        arrays += [] if self.adapter_ids is None else [self.adapter_ids]
        rest = (self.embeds_mask, self.key_ends, self.window_key_ends, self.token_types)
        return arrays + [array for array in rest if array is not None]

    def on_device(self, tensors: Sequence[Tensor]) -> Batch:
        """Return the batch, given its arrays as tensors; input_ids that only the device knows are put in."""
        rest = iter(tensors)
        input_ids, positions, cu_seqlens_q, context_lens = (next(rest) for _ in range(4))
        slot_mappings = [next(rest) for _ in self.slot_mappings]
        block_tables = [next(rest) for _ in self.block_tables]
        extras = [next(rest) for _ in self.extras]
        if self.last_sampled is not None:
            input_ids = input_ids + self.last_sampled.token_ids[next(rest)]
        adapter_ids = None if self.adapter_ids is None else next(rest)
        return Batch(
            input_ids=input_ids,
            positions=positions,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            groups=[GroupBatch(*group) for group in zip(slot_mappings, block_tables, strict=True)],
            inputs_embeds=self.inputs_embeds,
            embeds_mask=None if self.embeds_mask is None else next(rest),
            deep_embeds=self.deep_embeds,
            key_ends=None if self.key_ends is None else next(rest),
            window_key_ends=None if self.window_key_ends is None else next(rest),
            token_types=None if self.token_types is None else next(rest),
            adapter_ids=adapter_ids,
            extras=extras,
        )

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device; on a CPU its tensors share memory with these arrays."""
        return self.on_device(upload(self.arrays(), device))


def ragged_batch(
    input_ids: Array,
    *,
    starts: Sequence[int],
    num_tokens: Sequence[int],
    block_tables: Sequence[Array],
    specs: Sequence[CacheSpec],
    last_sampled: LastSampled | None = None,
    adapters: Array | None = None,
) -> HostBatch:
    """Build the batch of a step. Sequence b computes num_tokens[b] tokens from position starts[b] on.

    input_ids: [T] int64. last_sampled: see HostBatch. adapters: [B] int32, those of the sequences. block_tables:
    [B, max_blocks] int32 per cache group, which cover these tokens; for snapshots [B, 3], as in GroupBatch.
    """
    firsts, counts = np.array(starts, np.int64), np.array(num_tokens, np.int64)
    rows = np.arange(len(counts))
    if (counts == 1).all():
        cu_seqlens_q, positions = np.arange(len(counts) + 1), firsts
    else:
        cu_seqlens_q = np.concatenate([[0], np.cumsum(counts)])
        # The position of a token is its index in the batch, minus the index of its sequence's first token, plus the
        # position of that token.
        positions = np.arange(cu_seqlens_q[-1]) + np.repeat(firsts - cu_seqlens_q[:-1], counts)
        rows = np.repeat(rows, counts)
    slot_mappings = []
    for tables, spec in zip(block_tables, specs, strict=True):
        if spec.has_snapshots:
            slot_mappings.append(tables[rows, 1].astype(np.int64))
            continue
        blocks, offsets = np.divmod(positions, spec.block_size)
        slot_mappings.append(tables[rows, blocks].astype(np.int64) * spec.block_size + offsets)
    return HostBatch(
        input_ids=input_ids,
        positions=positions[np.newaxis],
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        context_lens=(firsts + counts).astype(np.int32),
        slot_mappings=slot_mappings,
        block_tables=block_tables,
        last_sampled=last_sampled,
        adapter_ids=None if adapters is None else adapters[rows],
    )
