"""What a step's hidden states mean for each slot: the tokens drawn, how far guesses hold, log-probabilities."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.engine.batch import Candidate, SlotResult, SlotWork
from pagewick.engine.forward import Ending, ForwardOutput
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.sampling.logit_edits import edit_logits, has_edits
from pagewick.engine.sampling.sampler import SampleRow, candidate_logprobs, sample, token_logprobs
from pagewick.engine.sampling.traits import traits_of
from pagewick.engine.scheduling.beam_search import BeamSearch
from pagewick.engine.slots import Slots
from pagewick.models.decoder import Decoder
from pagewick.sampling_params import SamplingParams

# Rows of the vocabulary head computed at a time for prompt log-probabilities: [256, vocab_size] floats.
_PROMPT_LOGPROBS_SLICE = 256

_NOT_NUMBERS = "the model computed logits that are not numbers for this request"
_NONE_ALLOWED = (
    "no token was allowed next: allowed_token_ids, bad_words, min_tokens and the constraint together leave none; "
    "loosen one of them"
)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The batch's logits [N, V], and of each of their rows the token and, if it means nothing, why.

    mirostat_mu: as Sampled has it; None: of no row.
    """

    logits: Tensor
    token_ids: list[int]
    is_valid: list[bool]
    is_poisoned: list[bool]
    mirostat_mu: list[float | None] | None = None


class SlotSampler:
    """Reads the sampling parameters and histories of slots, and notes there what was drawn."""

    def __init__(self, model: Decoder, slots: Slots, device: torch.device) -> None:
        self._model = model
        self._slots = slots
        self._device = device

    def ending(self, works: Sequence[SlotWork]) -> Ending:
        """How far the forward pass has to go for all of its tokens."""
        ending = Ending.MOST_LIKELY
        for work in works:
            if work.num_tokens != 1 or not work.is_sampled or work.prompt_targets or self._params(work).use_beam_search:
                return Ending.HIDDEN_STATES
            if traits_of(self._slots.sampling(work.slot)).is_drawn or has_edits(self._row(work)):
                ending = Ending.LOGITS
        return ending

    def results(self, works: Sequence[SlotWork], output: ForwardOutput) -> list[SlotResult]:
        """One result per work; output: of all their tokens in order, and at least as much as `ending` said."""
        if output.logits is not None:
            results = [SlotResult() for _ in works]
            pairs = list(zip(works, results, strict=True))
            if output.most_likely is None or output.highest is None:
                self._sample(pairs, output.logits)
            else:
                self._take_all(pairs, _most_likely(output.logits, output.most_likely, output.highest))
            return results
        return self._results(works, output.hidden_states)

    def _results(self, works: Sequence[SlotWork], hidden_states: Tensor) -> list[SlotResult]:
        results = [SlotResult() for _ in works]
        beams: list[tuple[SlotWork, SlotResult]] = []
        others: list[tuple[SlotWork, SlotResult]] = []
        beam_rows: list[int] = []
        rows: list[int] = []
        end = 0
        for work, result in zip(works, results, strict=True):
            if work.prompt_targets:
                result.prompt_logprobs = self._prompt_logprobs(work, hidden_states[end : end + work.num_tokens])
            end += work.num_tokens
            if not work.is_sampled:
                continue
            if self._params(work).use_beam_search:
                beams.append((work, result))
                beam_rows.append(end - 1)
            else:
                others.append((work, result))
                # The last token and those before it that a guess follows.
                rows += range(end - work.num_draft_tokens - 1, end)
        if beams:
            logits = self._model.compute_logits(self._rows(hidden_states, beam_rows))
            for place, (work, result) in enumerate(beams):
                self._take_candidates(work, logits[place : place + 1], result)
        if others:
            self._sample(others, self._model.compute_logits(self._rows(hidden_states, rows)))
        return results

    def _params(self, work: SlotWork) -> SamplingParams:
        return self._slots.sampling(work.slot).params

    def _rows(self, hidden_states: Tensor, rows: Sequence[int]) -> Tensor:
        if rows == list(range(len(hidden_states))):
            return hidden_states
        return hidden_states[torch.tensor(rows, device=self._device)]

    def _sample(self, pairs: Sequence[tuple[SlotWork, SlotResult]], logits: Tensor) -> None:
        """Draw a token for every row of logits: each work has one more than it has guesses."""
        rows: list[SampleRow] = []
        for work, _ in pairs:
            self._add_sample_rows(rows, work)
        sampled = sample(logits, rows)
        drawn = _Drawn(
            logits,
            sampled.token_ids.tolist(),
            sampled.is_valid.tolist(),
            sampled.is_poisoned.tolist(),
            sampled.mirostat_mu,
        )
        self._take_all(pairs, drawn)

    def _take_all(self, pairs: Sequence[tuple[SlotWork, SlotResult]], drawn: _Drawn) -> None:
        first = 0
        for work, result in pairs:
            self._take(work, drawn, first, result)
            first += work.num_draft_tokens + 1

    def _row(self, work: SlotWork) -> SampleRow:
        """For the first token to be drawn."""
        slots, slot = self._slots, work.slot
        position = work.start + work.num_tokens - work.num_draft_tokens
        return SampleRow(
            slots.sampling(slot), position, slots.history(slot), work.allowed_mask, slots.mirostat_mu[slot]
        )

    def _add_sample_rows(self, rows: list[SampleRow], work: SlotWork) -> None:
        first = self._row(work)
        rows.append(first)
        if not work.num_draft_tokens:
            return
        sampling, history = first.sampling, self._slots.history(work.slot)
        looks_back = traits_of(sampling).looks_back
        guesses = _guesses(work)
        for place in range(1, work.num_draft_tokens + 1):
            # What was drawn before this one, if it matters at all: the guesses up to here.
            known = history + array("i", guesses[:place]) if looks_back else history
            rows.append(SampleRow(sampling, first.position + place, known, work.allowed_mask, first.mirostat_mu))

    def _take(self, work: SlotWork, drawn: _Drawn, first: int, result: SlotResult) -> None:
        """The tokens from row `first` on, up to one that is not the one guessed, or that means nothing."""
        guesses = _guesses(work) if work.num_draft_tokens else ()
        last = first + work.num_draft_tokens
        for row in range(first, last + 1):
            if not drawn.is_valid[row]:
                _fail(result, is_poisoned=drawn.is_poisoned[row])
                break
            token_id = drawn.token_ids[row]
            result.token_ids.append(token_id)
            if row < last and guesses[row - first] != token_id:
                break
        if not result.token_ids:
            return
        self._slots.remember(work.slot, result.token_ids)
        if drawn.mirostat_mu is not None:
            self._slots.mirostat_mu[work.slot] = result.mirostat_mu = drawn.mirostat_mu[last]
        num_top = self._params(work).logprobs
        if num_top is not None:
            rows = drawn.logits[first : first + len(result.token_ids)]
            result.logprobs = token_logprobs(rows, torch.tensor(result.token_ids, device=self._device), num_top)

    def _take_candidates(self, work: SlotWork, logits: Tensor, result: SlotResult) -> None:
        """A beam's best tokens, in place of one that is drawn."""
        sampling, history = self._slots.sampling(work.slot), self._slots.history(work.slot)
        row = SampleRow(sampling, work.start + work.num_tokens, history, allowed_mask=work.allowed_mask)
        if not bool(logits.amax().isfinite()):
            _fail(result, is_poisoned=True)
            return
        scores = edit_logits(torch.log_softmax(logits, dim=-1), [row])[0]
        num_wanted = BeamSearch.num_candidates(sampling.params.n, len(sampling.stop_token_ids))
        values, token_ids = scores.topk(min(num_wanted, len(scores)))
        is_possible = values > float("-inf")
        values, token_ids = values[is_possible], token_ids[is_possible]
        if not len(values):
            _fail(result, is_poisoned=False)
            return
        num_top = sampling.params.logprobs
        reported = [None] * len(values) if num_top is None else candidate_logprobs(logits[0], token_ids, num_top)
        result.candidates = [
            Candidate(*found) for found in zip(token_ids.tolist(), values.tolist(), reported, strict=True)
        ]

    def _prompt_logprobs(self, work: SlotWork, hidden_states: Tensor) -> list[TokenLogprobs]:
        num_top = self._params(work).prompt_logprobs or 0
        targets = torch.tensor(work.prompt_targets, device=self._device)
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), _PROMPT_LOGPROBS_SLICE):
            last = min(first + _PROMPT_LOGPROBS_SLICE, len(targets))
            logits = self._model.compute_logits(hidden_states[first:last])
            found += token_logprobs(logits, targets[first:last], num_top)
        return found


def _most_likely(logits: Tensor, token_ids: Tensor, highest: Tensor) -> _Drawn:
    """Of logits that nobody has edited."""
    is_valid = [math.isfinite(value) for value in highest.tolist()]
    return _Drawn(logits, token_ids.tolist(), is_valid, [not valid for valid in is_valid])


def _guesses(work: SlotWork) -> list[int]:
    assert work.token_ids is not None, "guesses come with the token before them"
    return work.token_ids[len(work.token_ids) - work.num_draft_tokens :]


def _fail(result: SlotResult, *, is_poisoned: bool) -> None:
    result.error = _NOT_NUMBERS if is_poisoned else _NONE_ALLOWED
    result.is_poisoned = is_poisoned
