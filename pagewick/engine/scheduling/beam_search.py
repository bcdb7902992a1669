"""Beam search: the n most likely continuations, kept side by side.

Each step takes the candidates of all beams together, by the sum of their log-probabilities. Those of the best n that
end with a stop token become hypotheses, the best n that do not are the next beams. A hypothesis scores its sum divided
by its number of tokens to the power of length_penalty. It is over when n hypotheses score better than the best beam
does now, or, with early_stopping, when there are n; and at max_tokens, where the beams become hypotheses themselves.
These are the rules of transformers' generate(num_beams=n).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewick.engine.batch import Candidate
from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.engine.sequence import Request, Sequence


@dataclass(slots=True)
class Beam:
    """candidates: for its next token, best first; None until the step has given them."""

    seq: Sequence
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: list[Candidate] | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam to be: `parent` and one more token."""

    parent: Sequence
    token_id: int
    cumulative_logprob: float
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    score: float
    cumulative_logprob: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    stop_token_id: int | None


class BeamSearch:
    """The beams of one request. max_output_tokens: where they end at the latest."""

    def __init__(self, owner: Request, root: Sequence, stop_token_ids: frozenset[int], max_output_tokens: int) -> None:
        self._owner = owner
        self._params = owner.request.params
        self._stop_token_ids = stop_token_ids
        self._max_output_tokens = max_output_tokens
        self._hypotheses: list[_Hypothesis] = []
        self.beams = [Beam(root)]
        self.is_over = False

    @staticmethod
    def num_candidates(width: int, num_stop_tokens: int) -> int:
        """So many of a beam's best tokens must be known that `width` remain if every stop token is among them."""
        return max(2, 1 + num_stop_tokens) * width

    def beam_of(self, seq: Sequence) -> Beam:
        return next(beam for beam in self.beams if beam.seq is seq)

    @property
    def is_ready(self) -> bool:
        """Every beam has its candidates."""
        return all(beam.candidates is not None for beam in self.beams)

    def advance(self) -> list[Continuation]:
        """The next beams, best first; none if the search is over."""
        width = self._params.n
        num_tokens = self.beams[0].seq.num_output_tokens + 1
        ranked = sorted(
            (
                (beam.cumulative_logprob + candidate.score, -place, beam, candidate)
                for place, beam in enumerate(self.beams)
                for candidate in beam.candidates or []
            ),
            key=lambda ranked: ranked[:2],
            reverse=True,
        )
        if num_tokens <= self._params.min_tokens:
            ranked = [one for one in ranked if one[3].token_id not in self._stop_token_ids]
        best = ranked[: self.num_candidates(width, len(self._stop_token_ids))]
        is_last = num_tokens == self._max_output_tokens
        following: list[Continuation] = []
        for place, (total, _, beam, candidate) in enumerate(best):
            ends = candidate.token_id in self._stop_token_ids
            if (ends or is_last) and place < width:
                self._finish(beam, candidate, total, ends=ends)
            elif not ends and len(following) < width:
                logprobs = _extended(beam.logprobs, candidate)
                following.append(Continuation(beam.seq, candidate.token_id, total, logprobs))
        self._hypotheses = sorted(self._hypotheses, key=lambda one: one.score, reverse=True)[:width]
        self.is_over = is_last or not following or self._cannot_improve(following[0], num_tokens)
        return [] if self.is_over else following

    def deltas(self) -> list[RequestDelta]:
        """What was found, best first, once it is over."""
        request = self._owner.request
        return [
            RequestDelta(
                request_id=request.request_id,
                choice_index=index,
                token_ids=found.token_ids,
                logprobs=found.logprobs if self._params.logprobs is not None else None,
                finish_reason="length" if found.stop_token_id is None else "stop",
                stop_token_id=found.stop_token_id,
                num_cached_tokens=self._owner.num_cached_tokens or 0,
                cumulative_logprob=found.cumulative_logprob,
            )
            for index, found in enumerate(self._hypotheses)
        ]

    def _cannot_improve(self, best: Continuation, num_tokens: int) -> bool:
        if len(self._hypotheses) < self._params.n:
            return False
        possible = best.cumulative_logprob / num_tokens**self._params.length_penalty
        return self._params.early_stopping or possible <= self._hypotheses[-1].score

    def _finish(self, beam: Beam, candidate: Candidate, total: float, *, ends: bool) -> None:
        token_ids = [*beam.seq.token_ids[beam.seq.num_prompt_tokens :], candidate.token_id]
        score = total / len(token_ids) ** self._params.length_penalty
        stop_token_id = candidate.token_id if ends else None
        logprobs = _extended(beam.logprobs, candidate)
        self._hypotheses.append(_Hypothesis(score, total, token_ids, logprobs, stop_token_id))


def _extended(logprobs: list[TokenLogprobs], candidate: Candidate) -> list[TokenLogprobs]:
    """Of all the beam's tokens and one more; nothing if nobody asked."""
    return [] if candidate.logprobs is None else [*logprobs, candidate.logprobs]
