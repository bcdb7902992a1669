"""Candidates for beams: the best next tokens of a sequence, in place of a token that is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.engine.batch import Candidate, SlotResult
from pagewick.engine.sampling.logit_edits import edit_logits
from pagewick.engine.sampling.sampler import candidate_logprobs
from pagewick.engine.sampling.step_results import fail
from pagewick.engine.sampling.traits import SampleRow
from pagewick.engine.scheduling.beam_search import num_candidates


def take_candidates(row: SampleRow, logits: Tensor, result: SlotResult) -> None:
    """Find the best tokens for a beam in its logits [1, V], and store them in its result."""
    sampling = row.sampling
    if not bool(logits.amax().isfinite()):
        fail(result, is_poisoned=True)
        return
    scores = edit_logits(torch.log_softmax(logits, dim=-1), {0: row})[0]
    num_wanted = num_candidates(sampling.params.n, len(sampling.stop_token_ids))
    values, token_ids = scores.topk(min(num_wanted, len(scores)))
    is_possible = values > float("-inf")
    values, token_ids = values[is_possible], token_ids[is_possible]
    if not len(values):
        fail(result, is_poisoned=False)
        return
    num_top = sampling.params.logprobs
    reported = [None] * len(values) if num_top is None else candidate_logprobs(logits[0], token_ids, num_top)
    result.candidates = [Candidate(*found) for found in zip(token_ids.tolist(), values.tolist(), reported, strict=True)]
