"""What a step's hidden states mean for each slot: the tokens drawn, how far guesses hold, log-probabilities."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.engine.batch import Candidate, SlotResult, SlotWork
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.sampling.logit_edits import edit_logits
from pagewick.engine.sampling.sampler import SampleRow, candidate_logprobs, sample, token_logprobs
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
class _Sampled:
    """One work's rows of the batch's logits: the first, and of each the token and, if it means nothing, why."""

    first: int
    token_ids: list[int]
    is_valid: list[bool]
    is_poisoned: list[bool]
    mirostat_mu: float | None


class SlotSampler:
    """Reads the sampling parameters and histories of slots, and notes there what was drawn."""

    def __init__(self, model: Decoder, slots: Slots, device: torch.device) -> None:
        self._model = model
        self._slots = slots
        self._device = device

    def results(self, works: Sequence[SlotWork], hidden_states: Tensor) -> list[SlotResult]:
        """One result per work; hidden_states: [T, hidden_size] of all their tokens in order."""
        results = [SlotResult() for _ in works]
        ends, end = [], 0
        for work, result in zip(works, results, strict=True):
            if work.prompt_targets:
                result.prompt_logprobs = self._prompt_logprobs(work, hidden_states[end : end + work.num_tokens])
            end += work.num_tokens
            ends.append(end)
        beams = [index for index, work in enumerate(works) if work.is_sampled and self._params(work).use_beam_search]
        drawn = [index for index, work in enumerate(works) if work.is_sampled and index not in beams]
        if beams:
            logits = self._model.compute_logits(self._rows(hidden_states, [ends[index] - 1 for index in beams]))
            for place, index in enumerate(beams):
                self._take_candidates(works[index], logits[place : place + 1], results[index])
        if drawn:
            # Of each, the last token and those before it that a guess follows.
            rows = [row for i in drawn for row in range(ends[i] - works[i].num_draft_tokens - 1, ends[i])]
            logits = self._model.compute_logits(self._rows(hidden_states, rows))
            for index, sampled in zip(drawn, self._sample([works[index] for index in drawn], logits), strict=True):
                self._take(works[index], sampled, logits, results[index])
        return results

    def _params(self, work: SlotWork) -> SamplingParams:
        return self._slots.sampling(work.slot).params

    def _rows(self, hidden_states: Tensor, rows: Sequence[int]) -> Tensor:
        return hidden_states[torch.tensor(rows, device=self._device)]

    def _sample(self, works: Sequence[SlotWork], logits: Tensor) -> list[_Sampled]:
        """Draw a token for every row of logits: each work has one more than it has guesses."""
        sampled = sample(logits, [row for work in works for row in self._sample_rows(work)])
        token_ids, is_valid = sampled.token_ids.tolist(), sampled.is_valid.tolist()
        is_poisoned = sampled.is_poisoned.tolist()
        found, first = [], 0
        for work in works:
            end = first + work.num_draft_tokens + 1
            mirostat_mu = sampled.mirostat_mu[end - 1]
            rows = slice(first, end)
            found.append(_Sampled(first, token_ids[rows], is_valid[rows], is_poisoned[rows], mirostat_mu))
            first = end
        return found

    def _sample_rows(self, work: SlotWork) -> list[SampleRow]:
        sampling, history = self._slots.sampling(work.slot), self._slots.history(work.slot)
        position = work.start + work.num_tokens - work.num_draft_tokens
        guesses = (work.token_ids or [])[len(work.token_ids or []) - work.num_draft_tokens :]
        looks_back = bool(sampling.params.needs_history or sampling.bad_word_ids)
        return [
            SampleRow(
                sampling,
                position + place,
                # What was drawn before this one, if it matters at all: the guesses up to here.
                history + array("i", guesses[:place]) if looks_back and place else history,
                allowed_mask=work.allowed_mask,
                mirostat_mu=self._slots.mirostat_mu[work.slot],
            )
            for place in range(work.num_draft_tokens + 1)
        ]

    def _take(self, work: SlotWork, sampled: _Sampled, logits: Tensor, result: SlotResult) -> None:
        """The tokens up to the first that is not the one guessed, or that means nothing."""
        guesses = (work.token_ids or [])[len(work.token_ids or []) - work.num_draft_tokens :]
        for place, token_id in enumerate(sampled.token_ids):
            if not sampled.is_valid[place]:
                _fail(result, is_poisoned=sampled.is_poisoned[place])
                break
            result.token_ids.append(token_id)
            if place < len(guesses) and guesses[place] != token_id:
                break
        if not result.token_ids:
            return
        self._slots.remember(work.slot, result.token_ids)
        self._slots.mirostat_mu[work.slot] = result.mirostat_mu = sampled.mirostat_mu
        num_top = self._params(work).logprobs
        if num_top is not None:
            rows = logits[sampled.first : sampled.first + len(result.token_ids)]
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


def _fail(result: SlotResult, *, is_poisoned: bool) -> None:
    result.error = _NOT_NUMBERS if is_poisoned else _NONE_ALLOWED
    result.is_poisoned = is_poisoned
