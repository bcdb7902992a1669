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
from pagewick.engine.forward import ForwardOutput, ForwardStage
from pagewick.engine.host_batch import Batch, HostBatch
from pagewick.engine.sampling.columns import Draws
from pagewick.engine.sampling.sampler import sample
from pagewick.engine.sampling.step_results import StepResults
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.engine.slots import Slots
from pagewick.engine.speculation.proposals import wanting_works
from pagewick.engine.step_memory import GRAPH_TOKENS
from pagewick.layers.context import BatchRows, LayerBatch
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


class MtpPass:
    """A pass of the predicting layer, as a model whose small steps are recorded or captured (engine/graph).

    The hidden states that it reads are no part of a batch, so those of small batches are copied to memory that stays.
    """

    def __init__(self, model: Decoder, device: torch.device) -> None:
        assert model.model.mtp is not None, "the config says that there is a layer"
        self._model, self._stack, self._mtp = model, model.model, model.model.mtp
        weight = self._mtp.norm.weight
        # Rows of padding read zeros, or what an earlier batch has left.
        self._kept = torch.zeros(GRAPH_TOKENS, len(weight), dtype=weight.dtype, device=device)
        self._hidden_states = self._kept

    def read(self, hidden_states: Tensor) -> None:
        """Set the hidden states [T, hidden_size] for the next call."""
        self._hidden_states = hidden_states
        if len(hidden_states) <= len(self._kept):
            self._kept[: len(hidden_states)] = hidden_states
            self._hidden_states = self._kept

    def __call__(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden_size]. batch: the tokens with the ids of those after them."""
        hidden_states = self._hidden_states[: len(batch.input_ids)]
        predicted: Tensor = self._mtp(self._stack.embed(batch), hidden_states, batch)
        return predicted

    def compute_logits(self, hidden_states: Tensor, batch: LayerBatch | None) -> Tensor:
        """As that of the decoder."""
        return self._model.compute_logits(hidden_states, batch)


class MtpProposals:
    """Predicts with the layer of a model.

    predictor: its pass. forward: runs it, as `step_graph` makes it. expect: as in DrafterProposals, with the number of
    tokens.
    """

    reads_hidden_states: ClassVar[bool] = True

    def __init__(
        self,
        predictor: MtpPass,
        forward: Callable[[HostBatch, ForwardStage], ForwardOutput],
        slots: Slots,
        device: torch.device,
        expect: Callable[[int], None],
    ) -> None:
        self._predictor, self._forward = predictor, forward
        self._slots, self._device, self._expect = slots, device, expect

    def start(self, slot: int) -> None:
        """Nothing to forget: all that is kept of a sequence lies in its cache blocks."""

    def add_to(self, found: StepResults, plan: StepPlan, batch: HostBatch, hidden_states: Tensor) -> None:
        """Run the layer over all tokens of the step: later ones attend to them, even if no draft token is wanted."""
        results = found.get()
        next_ids = list(found.streams.token_ids)
        for work, result in zip(plan.work, results, strict=True):
            next_ids += _next_ids(work, result)
        output = self._predict(_with_next(batch, next_ids), hidden_states, ForwardStage.HIDDEN_STATES)
        chains, rows = self._begin(plan, results, batch)
        if not chains:
            return
        predicted = self._rows(output.hidden_states, rows)
        logits = self._predictor.compute_logits(predicted, BatchRows([1] * len(chains), self._device))
        while True:
            self._draw(chains, logits)
            # A chain that ends has no row in the next prediction.
            rows = [row for row, chain in enumerate(chains) if chain.is_open and self._has_room(chain)]
            if not rows:
                return
            if len(rows) < len(chains):
                chains, predicted = [chains[row] for row in rows], self._rows(predicted, rows)
            output = self._predict(self._continued(chains), predicted, ForwardStage.LOGITS)
            assert output.logits is not None, "the stage has them"
            predicted, logits = output.hidden_states, output.logits

    def _rows(self, hidden_states: Tensor, rows: Sequence[int]) -> Tensor:
        (where,) = upload([np.array(rows, np.int64)], self._device)
        return hidden_states[where]

    def _predict(self, batch: HostBatch, hidden_states: Tensor, stage: ForwardStage) -> ForwardOutput:
        """Run the layer; the next call overwrites the result.

        batch: the tokens whose places in the cache are written, with the ids of those after them.
        """
        self._expect(len(batch.input_ids))
        self._predictor.read(hidden_states)
        return self._forward(batch, stage)

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

    def _draw(self, chains: Sequence[_Chain], logits: Tensor) -> None:
        """Draw a draft token for each chain, with the parameters and the noise that the model has for this token."""
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
