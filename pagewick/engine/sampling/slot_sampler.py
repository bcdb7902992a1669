"""SlotSampler: turns a step's hidden states into tokens, accepted draft tokens and log-probabilities of each slot.

Sampling and reading the results are separate. `sample` computes on the device and stores the last token of each slot
there, which is all that the next forward pass needs; StepResults.get waits for the device and reads the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork, StepPlan, StreamWork
from pagewick.engine.device_copies import Array, download, upload
from pagewick.engine.forward import ForwardOutput, ForwardStage
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.sampling.candidates import take_candidates
from pagewick.engine.sampling.logit_edits import has_edits
from pagewick.engine.sampling.pooling import Pooler
from pagewick.engine.sampling.sampler import sample, score_tokens
from pagewick.engine.sampling.step_results import StepResults, Unread, fail
from pagewick.engine.sampling.step_rows import Drawn, Streams, row_of, rows_of
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.engine.slots import Slots
from pagewick.engine.streams import stream_of
from pagewick.kernels.options import DrawOptions
from pagewick.layers.context import BatchRows
from pagewick.models.decoder import Decoder
from pagewick.sampling_params import SamplingParams

# Rows of the vocabulary head computed at a time for prompt log-probabilities: [64, vocab_size] floats. They fit into
# the memory for the logits of 32 sequences, which are edited and sorted (step_memory.py).
_PROMPT_LOGPROBS_SLICE = 64

# The tokens that the constraint of a slot allows, for each token that it samples. None, or no entry: all tokens.
Masks = Mapping[int, Sequence[bytes | None]]


class SlotSampler:
    """Samples with the parameters and histories of slots, and stores the drawn tokens there.

    is_lazy: leave tokens on the device if the host can prepare the next step without them. This is for devices that
    compute beside the host; a forward pass must then not overwrite the logits of the previous one.
    """

    def __init__(self, model: Decoder, slots: Slots, device: torch.device, *, is_lazy: bool) -> None:
        self._model = model
        self._slots = slots
        self._device = device
        self._is_lazy = is_lazy
        self._stream = stream_of(device)
        self._pooler = Pooler(model, slots)
        self._streams = Streams.of(StreamWork())  # those of the latest forward_stage
        # The step that was left on the device last, and whose tokens belong to histories.
        self._left: StepResults | None = None

    def forward_stage(self, plan: StepPlan) -> ForwardStage:
        """Return how far the forward pass must go for all of its tokens."""
        streams = self._streams = Streams.of(plan.streams)
        columns, slots = self._slots.columns, streams.slots
        is_drawn = columns.is_drawn[slots]
        is_changed = columns.is_edited[slots] | (streams.starts + 1 < columns.min_position[slots])
        is_changed |= is_drawn & columns.needs_row[slots]
        any_changed, any_drawn = bool(is_changed.any()), bool(is_drawn.any())
        for work in plan.work:
            if work.num_tokens != 1 or not work.is_sampled or work.prompt_targets or self._params(work).use_beam_search:
                return ForwardStage.HIDDEN_STATES
            traits = traits_of(self._slots.sampling(work.slot))
            any_drawn = any_drawn or traits.is_drawn
            any_changed = any_changed or work.awaits_mask or has_edits(row_of(self._slots, work))
            any_changed = any_changed or (traits.is_drawn and traits.is_truncated)
        if any_changed or (any_drawn and (self._is_lazy or self._device.type != "cpu")):
            return ForwardStage.LOGITS
        return ForwardStage.DRAWN if any_drawn else ForwardStage.MOST_LIKELY

    def extras(self, plan: StepPlan, stage: ForwardStage) -> list[Array]:
        """Return arrays that travel with a plan's batch: [B] each, for its sequences.

        At stage DRAWN they are those of SamplingColumns.draws_ahead. On a device that computes beside the host, they
        are what sampling would otherwise copy there by itself: the slots and, at stage LOGITS, the fields of
        DrawOptions.
        """
        if stage == ForwardStage.HIDDEN_STATES or (self._stream is None and stage != ForwardStage.DRAWN):
            return []
        slots = np.array([*plan.streams.slots, *(work.slot for work in plan.work)], np.int64)
        if stage == ForwardStage.MOST_LIKELY:
            return [slots]
        starts = np.array([*plan.streams.starts, *(work.start for work in plan.work)], np.int64)
        if stage == ForwardStage.DRAWN:
            return self._slots.columns.draws_ahead(slots, starts + 1)
        return [slots, *self._slots.columns.draws(slots, starts + 1).options]

    def sample(self, plan: StepPlan, output: ForwardOutput, masks: Masks) -> StepResults:
        """Return the results of a plan. output: of all its tokens in order, at least up to their forward_stage."""
        self._complete_histories(plan)
        found = StepResults([SlotResult() for _ in plan.work], self._stream)
        streams = self._streams if self._streams.given is plan.streams else Streams.of(plan.streams)
        if output.logits is None:
            self._sample_some(plan, streams, output.hidden_states, masks, found)
            return found
        pairs = list(zip(plan.work, found.results, strict=True))
        if output.token_ids is None or output.highest is None:
            self._sample(streams, pairs, output.logits, masks, found, output.extras)
        else:
            self._take_given(streams, pairs, output, found)
        return found

    def _complete_histories(self, plan: StepPlan) -> None:
        """Read the tokens that the plan looks back at and that are still on the device.

        The host waits for the step before; the device has the plan's forward pass to compute meanwhile.
        """
        if self._left is None:
            return
        slots = [*plan.streams.slots, *(work.slot for work in plan.work if work.is_sampled)]
        if self._slots.has_history[slots].any():
            self._left.get()
            self._left = None

    def _sample_some(
        self, plan: StepPlan, streams: Streams, hidden_states: Tensor, masks: Masks, found: StepResults
    ) -> None:
        """Sample the streams and the works that want a token, and compute logits only for these."""
        beams: list[tuple[SlotWork, SlotResult]] = []
        others: list[tuple[SlotWork, SlotResult]] = []
        beam_rows: list[int] = []
        end = len(plan.streams.slots)
        num_seqs = end + len(plan.work)
        rows = list(range(end))
        num_beam_rows, num_rows = [0] * num_seqs, [1] * end + [0] * len(plan.work)
        for place, (work, result) in enumerate(zip(plan.work, found.results, strict=True), start=end):
            if work.prompt_targets:
                of_work = hidden_states[end : end + work.num_tokens]
                result.prompt_logprobs = self._prompt_logprobs(work, of_work, place, num_seqs)
            if self._slots.sampling(work.slot).pooling:
                of_work = self._model.known_rows(hidden_states[end : end + work.num_tokens])
                self._pooler.take(work, of_work, result, place)
            end += work.num_tokens
            if not work.is_sampled:
                continue
            if self._params(work).use_beam_search:
                beams.append((work, result))
                beam_rows.append(end - 1)
                num_beam_rows[place] = 1
            else:
                others.append((work, result))
                # The last token, and those before it that are followed by a draft token.
                rows += range(end - work.num_draft_tokens - 1, end)
                num_rows[place] = work.num_draft_tokens + 1
        self._pooler.score(self._model, num_seqs, self._device)
        if beams:
            logits = self._logits(self._rows(hidden_states, beam_rows), num_beam_rows)
            for place, (work, result) in enumerate(beams):
                take_candidates(row_of(self._slots, work), logits[place : place + 1], result)
        if rows:
            logits = self._logits(self._rows(hidden_states, rows), num_rows)
            self._sample(streams, others, logits, masks, found)

    def _logits(self, hidden_states: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Compute logits. num_rows: how many of the hidden states belong to each work."""
        return self._model.compute_logits(hidden_states, BatchRows(num_rows, self._device))

    def _params(self, work: SlotWork) -> SamplingParams:
        return self._slots.sampling(work.slot).params

    def _rows(self, hidden_states: Tensor, rows: Sequence[int]) -> Tensor:
        if rows == list(range(len(hidden_states))):
            return hidden_states
        (where,) = upload([np.array(rows, np.int64)], self._device)
        return hidden_states[where]

    def _sample(
        self,
        streams: Streams,
        pairs: Sequence[tuple[SlotWork, SlotResult]],
        logits: Tensor,
        masks: Masks,
        found: StepResults,
        extras: Sequence[Tensor] = (),
    ) -> None:
        """Draw a token for every row of logits: one for each stream, then those of the works.

        A work has one row more than draft tokens. extras: see `extras`.
        """
        columns, given = self._slots.columns, streams.given
        positions = streams.starts + 1
        needs_row = columns.needs_row[streams.slots] | (positions < columns.min_position[streams.slots])
        rows = {place: row_of(self._slots, given.work(place)) for place in np.flatnonzero(needs_row).tolist()}
        slots, first = streams.slots.tolist(), len(positions)
        of_works: list[SampleRow] = []
        for work, _ in pairs:
            of_works += rows_of(self._slots, work, masks.get(work.slot, ()))
            slots += [work.slot] * (work.num_draft_tokens + 1)
        rows |= enumerate(of_works, start=first)
        positions = np.array([*positions.tolist(), *(row.position for row in of_works)], np.int64)
        draws = columns.draws(np.array(slots, np.int64), positions)
        if extras:
            draws = replace(draws, on_device=DrawOptions(*extras[1:]))
        sampled = sample(logits, rows, draws)
        if self._can_wait(streams, pairs):
            flags = sampled.is_valid, sampled.is_poisoned
            self._leave(streams, pairs, logits, sampled.token_ids, flags, found, extras)
            return
        copies = download([sampled.token_ids, sampled.is_valid, sampled.is_poisoned])
        self._wait()
        token_ids, is_valid, is_poisoned = (copy.tolist() for copy in copies)
        drawn = Drawn(logits, sampled.token_ids, token_ids, is_valid, is_poisoned, sampled.mirostat_mu)
        self._take_all(streams, pairs, drawn, found)

    def _take_given(
        self,
        streams: Streams,
        pairs: Sequence[tuple[SlotWork, SlotResult]],
        output: ForwardOutput,
        found: StepResults,
    ) -> None:
        """Take the tokens that the forward pass has chosen; no sampling parameter has changed the logits."""
        logits, token_ids, highest = output.logits, output.token_ids, output.highest
        assert logits is not None and token_ids is not None and highest is not None
        if self._can_wait(streams, pairs):
            is_valid = highest.isfinite()
            self._leave(streams, pairs, logits, token_ids, (is_valid, ~is_valid), found, output.extras)
            return
        arrays = output.arrays or [copy.numpy() for copy in download([token_ids, highest])]
        self._wait()
        valid = np.isfinite(arrays[1]).tolist()
        drawn = Drawn(logits, token_ids, arrays[0].tolist(), valid, [not one for one in valid])
        self._take_all(streams, pairs, drawn, found)

    def _wait(self) -> None:
        """Wait for everything that the device has been given to do."""
        if self._stream is not None:
            self._stream.record_event().synchronize()

    def _can_wait(self, streams: Streams, pairs: Sequence[tuple[SlotWork, SlotResult]]) -> bool:
        """Whether the host can prepare the next step without these tokens."""
        if not self._is_lazy or any(work.num_draft_tokens or work.num_wanted_drafts for work, _ in pairs):
            return False
        return not self._slots.columns.uses_mirostat[streams.with_works(pairs)].any()

    def _leave(
        self,
        streams: Streams,
        pairs: Sequence[tuple[SlotWork, SlotResult]],
        logits: Tensor,
        token_ids: Tensor,
        flags: tuple[Tensor, Tensor],
        found: StepResults,
        extras: Sequence[Tensor],
    ) -> None:
        """Leave the tokens [N], one of each sequence, on the device, and store them there as the slots' last tokens.

        flags: whether each is valid, and whether it is poisoned.
        """
        slots = streams.with_works(pairs)
        self._slots.remember_last(slots, token_ids, extras[0] if extras else None)
        scored: dict[int, list[int]] = {}
        for row in np.flatnonzero(self._slots.columns.has_details[slots]).tolist():
            num_top = self._slots.sampling(int(slots[row])).params.logprobs
            if num_top is not None:
                scored.setdefault(num_top, []).append(row)
        scores = []
        for num_top, rows in scored.items():
            scores.append((rows, score_tokens(self._rows(logits, rows), self._rows(token_ids, rows), num_top)))
        results, histories = [result for _, result in pairs], self._slots.histories(slots)
        found.leave(Unread(found.streams, results, token_ids, *flags, scores, histories))
        if histories:
            self._left = found

    def _take_all(
        self,
        streams: Streams,
        pairs: Sequence[tuple[SlotWork, SlotResult]],
        drawn: Drawn,
        found: StepResults,
    ) -> None:
        """Store the tokens of every row in the results and the slots."""
        first = len(streams.slots)
        found.streams.token_ids = drawn.token_ids[:first]
        taken = self._take_streams(streams, drawn, found) if first else []
        for work, result in pairs:
            self._take(work, drawn, first, result)
            first += work.num_draft_tokens + 1
        taken += [(work.slot, result) for work, result in pairs]
        taken = [(slot, result) for slot, result in taken if result.token_ids]
        self._slots.remember([slot for slot, _ in taken], [result.token_ids for _, result in taken])

    def _take_streams(self, streams: Streams, drawn: Drawn, found: StepResults) -> list[tuple[int, SlotResult]]:
        """Store the tokens of the streams; return (slot, result) for those that report more than a token."""
        num_streams = len(streams.slots)
        of_streams = drawn.on_device if num_streams == len(drawn.token_ids) else drawn.on_device[:num_streams]
        self._slots.remember_last(streams.slots, of_streams)
        is_rare = self._slots.columns.has_details[streams.slots] | self._slots.has_history[streams.slots]
        valid = drawn.is_valid[:num_streams]
        if not all(valid):
            is_rare |= ~np.array(valid)
        taken = []
        for place in np.flatnonzero(is_rare).tolist():
            result = found.streams.details[place] = SlotResult()
            work = streams.given.work(place)
            self._take(work, drawn, place, result)
            taken.append((work.slot, result))
        return taken

    def _take(self, work: SlotWork, drawn: Drawn, first: int, result: SlotResult) -> None:
        """Take the tokens from row `first` on, up to the first that differs from its draft token or is invalid."""
        draft_token_ids = work.draft_token_ids
        last = first + work.num_draft_tokens
        for row in range(first, last + 1):
            if not drawn.is_valid[row]:
                fail(result, is_poisoned=drawn.is_poisoned[row])
                break
            token_id = drawn.token_ids[row]
            result.token_ids.append(token_id)
            if row < last and draft_token_ids[row - first] != token_id:
                break
        if not result.token_ids:
            return
        if drawn.mirostat_mu is not None:
            self._slots.mirostat_mu[work.slot] = result.mirostat_mu = drawn.mirostat_mu[last]
        num_top = self._params(work).logprobs
        if num_top is not None:
            rows = slice(first, first + len(result.token_ids))
            result.logprobs = score_tokens(drawn.logits[rows], drawn.on_device[rows], num_top).to_list()

    def _prompt_logprobs(
        self, work: SlotWork, hidden_states: Tensor, place: int, num_works: int
    ) -> list[TokenLogprobs]:
        """Score the work's prompt_targets. hidden_states: those of the work, which is at `place` among num_works."""
        num_top = self._params(work).prompt_logprobs or 0
        (targets,) = upload([np.array(work.prompt_targets, np.int64)], self._device)
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), _PROMPT_LOGPROBS_SLICE):
            last = min(first + _PROMPT_LOGPROBS_SLICE, len(targets))
            num_rows = [last - first if other == place else 0 for other in range(num_works)]
            logits = self._logits(hidden_states[first:last], num_rows)
            found += score_tokens(logits, targets[first:last], num_top).to_list()
        return found
