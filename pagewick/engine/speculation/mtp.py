"""MtpProposals: draft tokens from the model's own layer that predicts further tokens (multi-token prediction).

The layer runs after each step, over the same tokens in the same batch, and stores its keys and values in the same cache
blocks as the model's layers. So prefixes, copies and preemptions take them along, and the scheduler knows nothing of
it. A token's keys and values depend on the token after it. Two sequences that share a block may differ in the token
behind it; the last place of the block is then made for one of them, which can only make a draft token worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork, StepPlan
from pagewick.engine.device_copies import Array, upload
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.sampling.columns import Draws
from pagewick.engine.sampling.sampler import sample
from pagewick.engine.sampling.step_results import StepResults
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.engine.slots import Slots
from pagewick.engine.speculation.proposals import wanting_works
from pagewick.layers.context import BatchRows
from pagewick.models.decoder import Decoder


@dataclass(slots=True)
class _Chain:
    """The draft tokens of one sequence, each predicted after the one before.

    place: in the sequence, of the token behind whose hidden states the next prediction is made. position: [P], of this
    token. history: all tokens of the sequence, if sampling looks back. is_broken: a prediction had no numbers.
    """

    work: SlotWork
    result: SlotResult
    place: int
    position: Array
    history: list[int]
    is_broken: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the sequence wants another draft token."""
        return not self.is_broken and len(self.result.draft_token_ids) < self.work.num_wanted_drafts


class MtpProposals:
    """Predicts with the layer of `model`. expect: as in DrafterProposals, with the number of tokens."""

    reads_hidden_states: ClassVar[bool] = True

    def __init__(self, model: Decoder, slots: Slots, device: torch.device, expect: Callable[[int], None]) -> None:
        assert model.model.mtp is not None, "the config says that there is a layer"
        self._model, self._stack, self._mtp = model, model.model, model.model.mtp
        self._slots, self._device, self._expect = slots, device, expect

    def start(self, slot: int) -> None:
        """Nothing to forget: all that is kept of a sequence lies in its cache blocks."""

    def add_to(self, found: StepResults, plan: StepPlan, batch: HostBatch, hidden_states: Tensor) -> None:
        """Run the layer over all tokens of the step: later ones attend to them, even if no draft token is wanted."""
        results = found.get()
        next_ids = list(found.streams.token_ids)
        for work, result in zip(plan.work, results, strict=True):
            next_ids += _next_ids(work, result)
        predicted = self._predict(_with_next(batch, next_ids), hidden_states)
        chains, rows = self._begin(plan, results, batch)
        while chains:
            predicted = self._rows(predicted, rows)
            self._draw(chains, predicted)
            # A chain that ends has no row in the next prediction.
            rows = [row for row, chain in enumerate(chains) if chain.is_open and self._has_room(chain)]
            chains = [chains[row] for row in rows]
            if chains:
                predicted = self._predict(self._continued(chains), self._rows(predicted, rows))
                rows = list(range(len(chains)))

    def _rows(self, hidden_states: Tensor, rows: Sequence[int]) -> Tensor:
        (where,) = upload([np.array(rows, np.int64)], self._device)
        return hidden_states[where]

    def _predict(self, batch: HostBatch, hidden_states: Tensor) -> Tensor:
        """Run the layer. batch: the tokens whose places in the cache are written, with the ids of those after them."""
        self._expect(len(batch.input_ids))
        on_device = batch.to(self._device)
        found: Tensor = self._mtp(self._stack.embed(on_device), hidden_states, on_device)
        return found

    def _begin(self, plan: StepPlan, results: Sequence[SlotResult], batch: HostBatch) -> tuple[list[_Chain], list[int]]:
        """Begin a chain for each sequence that wants draft tokens, behind the last token that it has accepted.

        Returns the chains, and the row of each one's first prediction.
        """
        firsts = batch.cu_seqlens_q[len(plan.streams.slots) :].tolist()
        chains, rows = [], []
        for index, work, result in wanting_works(plan.work, results, self._slots):
            # The step has sampled one token more than it has accepted draft tokens.
            offset = work.num_tokens - work.num_draft_tokens + len(result.token_ids) - 2
            row = firsts[index] + offset
            sampling, history = self._slots.sampling(work.slot), []
            if traits_of(sampling).looks_back:
                history = list(self._slots.history(work.slot))
            chains.append(_Chain(work, result, work.start + offset, batch.positions[:, row], history))
            rows.append(row)
        return chains, rows

    def _draw(self, chains: Sequence[_Chain], predicted: Tensor) -> None:
        """Draw a draft token for each chain, with the parameters and the noise that the model has for this token."""
        logits = self._model.compute_logits(predicted, BatchRows([1] * len(chains), self._device))
        rows = [SampleRow(self._slots.sampling(chain.work.slot), chain.place + 2, chain.history) for chain in chains]
        sampled = sample(logits, dict(enumerate(rows)), Draws.of(rows))
        for chain, token_id, is_valid in zip(
            chains, sampled.token_ids.tolist(), sampled.is_valid.tolist(), strict=True
        ):
            chain.place += 1
            chain.position = chain.position + 1
            if is_valid:
                chain.result.draft_token_ids.append(token_id)
                chain.history.append(token_id)
            else:
                chain.is_broken = True

    def _has_room(self, chain: _Chain) -> bool:
        """Whether the sequence has a cache block for the token from which the chain would go on."""
        return chain.place < self._slots.num_covered(chain.work.slot)

    def _continued(self, chains: Sequence[_Chain]) -> HostBatch:
        """Return a batch of one token of each chain: its id is that of the last draft token."""
        token_ids = [chain.result.draft_token_ids[-1] for chain in chains]
        slots, places = [chain.work.slot for chain in chains], [chain.place for chain in chains]
        batch = self._slots.single_tokens(slots, places, token_ids)
        return replace(batch, positions=np.stack([chain.position for chain in chains], axis=1))


def _next_ids(work: SlotWork, result: SlotResult) -> list[int]:
    """Return the tokens after those of a work, as many as it has. 0 stands for those that do not follow."""
    token_ids = work.token_ids or [0]
    confirmed = len(token_ids) - work.num_draft_tokens
    behind = token_ids[1:confirmed]
    if not work.is_sampled:
        behind += [max(work.next_token_id, 0)]
    behind += result.token_ids[: work.num_tokens - len(behind)]
    return behind + [0] * (work.num_tokens - len(behind))


def _with_next(batch: HostBatch, next_ids: Sequence[int]) -> HostBatch:
    """Return the batch with the embeddings of the tokens after its own."""
    rows, mask = None, None
    if batch.inputs_embeds is not None and batch.embeds_mask is not None:
        # The last token of a sequence in this step may stand before a part of an image that comes later. It gets the
        # embedding of the token in its place.
        rows, mask = batch.inputs_embeds.roll(-1, 0), np.roll(batch.embeds_mask, -1)
        mask[batch.cu_seqlens_q[1:] - 1] = False
    ids = np.array(next_ids, np.int64)
    return replace(batch, input_ids=ids, last_sampled=None, inputs_embeds=rows, embeds_mask=mask, extras=())
