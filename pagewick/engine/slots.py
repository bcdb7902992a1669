"""Slots: the state that the runner keeps of running sequences, from which it builds the batch of a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import SlotSampling, SlotStart, SlotWork, StepPlan
from pagewick.engine.device_copies import Array, upload
from pagewick.engine.host_batch import HostBatch, LastSampled, ragged_batch
from pagewick.engine.sampling.columns import SamplingColumns


@dataclass(frozen=True, slots=True)
class _StreamsBatch:
    """The batch of a step with streams only. slots, next_starts: those of the streams, and where they continue."""

    batch: HostBatch
    slots: list[int]
    next_starts: list[int]


class Slots:
    """Block tables, sampling parameters and last tokens of up to `max_num_seqs` sequences.

    device: the device that samples tokens. Unless it is a CPU, the last token of each slot stays there.
    columns: the parameters as arrays. has_history: by slot, whether sampling or drafting looks back at the tokens of
    its sequence.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        no_adapter: int = 0,
    ) -> None:
        """no_adapter: the number of the adapter of sequences without one, see LoraLayer."""
        self._specs = list(specs)
        self._device = device
        self._max_model_len = max_model_len
        self._block_tables = [np.zeros((max_num_seqs, spec.table_width(max_model_len)), np.int32) for spec in specs]
        self._table_lens = np.zeros((len(specs), max_num_seqs), np.int64)
        # The last element belongs to no slot and stays 0.
        self._no_slot = max_num_seqs
        self._last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        # On a CPU the host knows every token and uses this array instead, which is read faster than a tensor.
        self._last_on_host = np.zeros(max_num_seqs + 1, np.int64) if device.type == "cpu" else None
        self._sampling: list[SlotSampling | None] = [None] * max_num_seqs
        self._histories: list[array[int]] = [array("i") for _ in range(max_num_seqs)]
        self.columns = SamplingColumns(max_num_seqs)
        self.has_history = np.zeros(max_num_seqs, bool)
        self.mirostat_mu: list[float | None] = [None] * max_num_seqs
        self._no_adapter = no_adapter
        self._adapters = np.full(max_num_seqs, no_adapter, np.int32)
        self._latest: _StreamsBatch | None = None
        # Whether batches that continue the latest one may be steady.
        self._can_be_steady = False

    def sampling(self, slot: int) -> SlotSampling:
        params = self._sampling[slot]
        assert params is not None, "the plan uses a slot that it never started"
        return params

    def history(self, slot: int) -> array[int]:
        """Return all tokens of the slot's sequence; empty unless sampling or drafting looks back at them."""
        return self._histories[slot]

    def histories(self, slots: Array) -> dict[int, array[int]]:
        """Return the histories of these slots [N], by place, of those that have one.

        They stay those of the slots' present sequences, to which tokens can be added after others have the slots.
        """
        return {place: self._histories[slots[place]] for place in np.flatnonzero(self.has_history[slots]).tolist()}

    def remember(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Store the tokens, one or more, that each of these slots has sampled."""
        if not slots:
            return
        last = np.array([sampled[-1] for sampled in token_ids], np.int64)
        if self._last_on_host is not None:
            self._last_on_host[list(slots)] = last
        else:
            where, values = upload([np.array(slots, np.int64), last], self._device)
            self._last_token_ids[where] = values
        for slot, sampled in zip(slots, token_ids, strict=True):
            if self.has_history[slot]:
                self._histories[slot].extend(sampled)

    def remember_last(self, slots: Array, token_ids: Tensor, on_device: Tensor | None = None) -> None:
        """Store a sampled token for each of these slots: token_ids [N], on the device. Histories are not extended.

        on_device: the slots, if they are there already.
        """
        if self._last_on_host is None:
            (where,) = upload([slots], self._device) if on_device is None else (on_device,)
            self._last_token_ids[where] = token_ids
        else:
            self._last_on_host[slots] = token_ids.numpy()

    def apply(self, plan: StepPlan) -> None:
        """Update the slots with the sequences, tokens and blocks that are new in the plan."""
        self._latest = None
        for start in plan.starts:
            self._start(start)
        for place, new_block_ids in plan.streams.new_block_ids.items():
            self._add_blocks(plan.streams.slots[place], new_block_ids)
        for work in plan.work:
            self._extend(work)

    def build(self, plan: StepPlan) -> HostBatch:
        """Apply the plan and build the step's batch."""
        streams = plan.streams
        batch = self._continued(plan)
        if batch is None:
            batch = self._build(plan)
            self._can_be_steady = self._are_plain(streams.slots)
        if not plan.work:
            self._latest = _StreamsBatch(batch, streams.slots, [start + 1 for start in streams.starts])
        return batch

    def _continued(self, plan: StepPlan) -> HostBatch | None:
        """Build the batch of a plan that continues the streams of the latest one, and has nothing else.

        Most of its arrays are those of the latest batch. None for other plans, and where a stream enters another block.
        """
        latest, streams = self._latest, plan.streams
        if latest is None or plan.work or plan.starts or streams.new_block_ids:
            return None
        if streams.slots != latest.slots or streams.starts != latest.next_starts:
            return None
        positions = latest.batch.positions + 1
        is_steady = self._can_be_steady and int(positions.max()) + 1 < self._max_model_len
        slot_mappings = []
        for spec, mapping in zip(self._specs, latest.batch.slot_mappings, strict=True):
            if spec.has_snapshots:
                slot_mappings.append(mapping)
            elif (positions % spec.block_size).all():
                slot_mappings.append(mapping + 1)
                is_steady = is_steady and bool(((positions + 1) % spec.block_size).all())
            else:
                return None
        # In place of dataclasses.replace, which looks at every field of the class in each step.
        batch = latest.batch
        return HostBatch(
            input_ids=batch.input_ids if self._last_on_host is None else self._last_on_host[streams.slots],
            positions=positions,
            cu_seqlens_q=batch.cu_seqlens_q,
            context_lens=batch.context_lens + np.int32(1),
            slot_mappings=slot_mappings,
            block_tables=batch.block_tables,
            last_sampled=batch.last_sampled,
            adapter_ids=batch.adapter_ids,
            is_steady=is_steady,
        )

    def _are_plain(self, slots: Sequence[int]) -> bool:
        """Whether, on a CPU, none of these streams reports more than its tokens, and no layer has a running state."""
        if self._device.type != "cpu" or any(spec.has_snapshots for spec in self._specs):
            return False
        return not self.columns.has_details[slots].any()

    def _build(self, plan: StepPlan) -> HostBatch:
        self.apply(plan)
        works, streams = plan.work, plan.streams
        slots = np.array([*streams.slots, *(work.slot for work in works)], np.int64)
        input_ids, last_sampled = self._input_ids(slots[: len(streams.slots)], works)
        adapters = self._adapters[slots]
        return ragged_batch(
            input_ids,
            last_sampled=last_sampled,
            adapters=adapters if (adapters != self._no_adapter).any() else None,
            starts=[*streams.starts, *(work.start for work in works)],
            num_tokens=[*[1] * len(streams.slots), *(work.num_tokens for work in works)],
            block_tables=self._tables_of(slots),
            specs=self._specs,
        )

    def num_covered(self, slot: int) -> int:
        """Return for how many tokens of the slot's sequence there are blocks, at most the longest context."""
        covered = [
            int(lens[slot]) * spec.block_size
            for lens, spec in zip(self._table_lens, self._specs, strict=True)
            if not spec.has_snapshots
        ]
        return min(self._max_model_len, *covered) if covered else 0

    def single_tokens(self, slots: Sequence[int], places: Sequence[int], token_ids: Sequence[int]) -> HostBatch:
        """Build a batch of one token of each of these slots, at this place of its sequence; nothing is remembered."""
        return ragged_batch(
            np.array(token_ids, np.int64),
            starts=places,
            num_tokens=[1] * len(slots),
            block_tables=self._tables_of(np.array(slots, np.int64)),
            specs=self._specs,
        )

    def _tables_of(self, slots: Array) -> list[Array]:
        return [
            tables[slots, : lens[slots].max()]
            for tables, lens in zip(self._block_tables, self._table_lens, strict=True)
        ]

    def _start(self, start: SlotStart) -> None:
        self._sampling[start.slot] = start.sampling
        self.columns.set(start.slot, start.sampling)
        self._histories[start.slot] = array("i", start.token_ids)
        self.has_history[start.slot] = bool(start.token_ids)
        self.mirostat_mu[start.slot] = start.mirostat_mu
        self._adapters[start.slot] = self._no_adapter if start.adapter < 0 else start.adapter
        for group, table in enumerate(start.block_tables):
            self._table_lens[group, start.slot] = 0
            self._append(group, start.slot, table)

    def _add_blocks(self, slot: int, new_block_ids: Sequence[Sequence[int]], num_stored: int = 0) -> None:
        for group, block_ids in enumerate(new_block_ids):
            if self._specs[group].has_snapshots:
                self._table_lens[group, slot] = 0
                self._append(group, slot, [*block_ids, num_stored])
            elif block_ids:
                self._append(group, slot, block_ids)

    def _extend(self, work: SlotWork) -> None:
        self._add_blocks(work.slot, work.new_block_ids, work.num_stored)
        if not self.has_history[work.slot]:
            return
        history = self._histories[work.slot]
        if work.token_ids and not work.num_draft_tokens:
            # The next token of a beam is not the one that the slot sampled last; it comes with the work.
            history.extend(work.token_ids[len(history) - work.start :])

    def _append(self, group: int, slot: int, block_ids: Sequence[int]) -> None:
        length = self._table_lens[group, slot]
        # Blocks that the sequence does not hold (-1) are never read; 0 keeps their address inside the pool.
        self._block_tables[group][slot, length : length + len(block_ids)] = np.maximum(block_ids, 0)
        self._table_lens[group, slot] += len(block_ids)

    def _input_ids(self, streams: Array, works: Sequence[SlotWork]) -> tuple[Array, LastSampled | None]:
        """Return HostBatch.input_ids and HostBatch.last_sampled. streams: slots of the streams, which come first."""
        slots = [*streams.tolist()]
        input_ids = [0] * len(slots)
        for work in works:
            known = work.token_ids
            input_ids += [0] if known is None else known
            slots += [work.slot] if known is None else [self._no_slot] * len(known)
        token_ids, sources = np.array(input_ids, np.int64), np.array(slots, np.int64)
        if self._last_on_host is None:
            return token_ids, LastSampled(sources, self._last_token_ids)
        return token_ids + self._last_on_host[sources], None
