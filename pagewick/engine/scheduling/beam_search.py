"""Beam search: the n most likely continuations, computed side by side.

Each step ranks the candidates of all beams together, by the sum of their log-probabilities. Among the best n, those
that end with a stop token become hypotheses; the best n that do not are the next beams. The score of a hypothesis is
its sum divided by its number of tokens to the power of length_penalty. The search is over when n hypotheses score
better than the best beam does now, or, with early_stopping, when there are n. At max_tokens the beams become hypotheses
themselves. These are the rules of transformers' generate(num_beams=n).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.engine.batch import Candidate
from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.engine.sequence import Beam, Hypothesis, Request, Sequence


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: `parent` and one more token."""

    parent: Sequence
    token_id: int
    cumulative_logprob: float
    logprobs: list[TokenLogprobs]


def num_candidates(width: int, num_stop_tokens: int) -> int:
    """Number of a beam's best tokens to know, so that `width` remain even if every stop token is among them."""
    return max(2, 1 + num_stop_tokens) * width


def advance(owner: Request) -> list[Continuation]:
    """Return the next beams of a search whose beams all have candidates, best first; none if the search is over.

    Adds what ends here to owner.hypotheses, which keeps the best n.
    """
    params, stop_token_ids = owner.request.params, owner.stop_token_ids
    num_tokens = owner.beams[0].seq.num_output_tokens + 1
    ranked = sorted(
        (
            (beam.cumulative_logprob + candidate.score, -place, beam, candidate)
            for place, beam in enumerate(owner.beams)
            for candidate in beam.candidates or []
        ),
        key=lambda ranked: ranked[:2],
        reverse=True,
    )
    if num_tokens <= params.min_tokens:
        ranked = [one for one in ranked if one[3].token_id not in stop_token_ids]
    is_last = num_tokens == owner.max_output_tokens
    following: list[Continuation] = []
    for place, (total, _, beam, candidate) in enumerate(ranked[: num_candidates(params.n, len(stop_token_ids))]):
        is_stop = candidate.token_id in stop_token_ids
        # The request wants log-probabilities of all tokens or of none.
        logprobs = [] if candidate.logprobs is None else [*beam.logprobs, candidate.logprobs]
        if (is_stop or is_last) and place < params.n:
            owner.hypotheses.append(_hypothesis(beam, candidate, total, logprobs, is_stop=is_stop))
        elif not is_stop and len(following) < params.n:
            following.append(Continuation(beam.seq, candidate.token_id, total, logprobs))
    owner.hypotheses = sorted(owner.hypotheses, key=lambda one: one.score, reverse=True)[: params.n]
    is_over = is_last or not following or _cannot_improve(owner, following[0].cumulative_logprob, num_tokens)
    return [] if is_over else following


def deltas(owner: Request) -> list[RequestDelta]:
    """Return the outcome of a search that is over, one delta per hypothesis, best first."""
    return [
        RequestDelta(
            request_id=owner.request.request_id,
            choice_index=index,
            token_ids=found.token_ids,
            logprobs=found.logprobs if owner.request.params.logprobs is not None else None,
            finish_reason="length" if found.stop_token_id is None else "stop",
            stop_token_id=found.stop_token_id,
            num_cached_tokens=owner.num_cached_tokens or 0,
            cumulative_logprob=found.cumulative_logprob,
        )
        for index, found in enumerate(owner.hypotheses)
    ]


def _cannot_improve(owner: Request, best_logprob: float, num_tokens: int) -> bool:
    params = owner.request.params
    if len(owner.hypotheses) < params.n:
        return False
    return params.early_stopping or best_logprob / num_tokens**params.length_penalty <= owner.hypotheses[-1].score


def _hypothesis(
    beam: Beam, candidate: Candidate, total: float, logprobs: list[TokenLogprobs], *, is_stop: bool
) -> Hypothesis:
    token_ids = [*beam.seq.token_ids[beam.seq.num_prompt_tokens :], candidate.token_id]
    score = total / len(token_ids) ** beam.seq.params.length_penalty
    return Hypothesis(score, total, token_ids, logprobs, candidate.token_id if is_stop else None)
