"""OutputStream: what the engine says about one choice, turned into what a client reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.outputs import CompletionOutput, FinishReason, Logprob
from pagewick.sampling_params import SamplingParams
from pagewick.text.detokenizer import Detokenizer
from pagewick.text.tokenizer import Tokenizer

# Stands for minus infinity, which JSON cannot say; the OpenAI API does the same.
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class TokenChoice:
    """A token that was or could have been chosen, as text, as bytes, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


@dataclass(slots=True)
class PositionLogprobs:
    """One position of the text: the chosen token and the most likely ones, best first."""

    chosen: TokenChoice
    top: list[TokenChoice]


@dataclass(slots=True)
class ChoiceDelta:
    """What is new in a choice. Joined over a choice's deltas, `text` and `token_ids` are those of its output.

    logprobs: of the tokens that make up the text, so without the token that ended it; None if not asked for.
    stop_reason: the stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputStream:
    """Follows one choice token by token: text, stop strings, log-probabilities.

    `output` is the choice so far. `is_stopped` says that a stop string has ended it: the caller then aborts
    the engine's request, and whatever that still delivers is ignored. Where the engine's deltas are cut
    changes nothing but where ours are cut.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, index: int) -> None:
        wants_logprobs = params.logprobs is not None
        self.output = CompletionOutput(index=index, logprobs=[] if wants_logprobs else None)
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._held = ""  # text that may turn out to be the beginning of a stop string

    def feed(self, delta: RequestDelta) -> ChoiceDelta:
        """What the engine's delta adds to the choice."""
        result = ChoiceDelta(self.output.index, logprobs=None if self.output.logprobs is None else [])
        if self.output.finish_reason is not None:
            return result
        self.output.num_draft_tokens = max(self.output.num_draft_tokens, delta.num_draft_tokens)
        self.output.num_accepted_tokens = max(self.output.num_accepted_tokens, delta.num_accepted_tokens)
        for position, token_id in enumerate(delta.token_ids):
            logprobs = delta.logprobs[position] if delta.logprobs else None
            is_end = delta.stop_token_id is not None and position == len(delta.token_ids) - 1
            self._add_token(result, token_id, logprobs, is_end=is_end)
            if self.is_stopped:
                break
        if delta.cumulative_logprob is not None:
            self.output.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None and not self.is_stopped:
            self._finish(result, delta)
        self.output.text += result.text
        return result

    def _add_token(self, result: ChoiceDelta, token_id: int, logprobs: TokenLogprobs | None, *, is_end: bool) -> None:
        result.token_ids.append(token_id)
        self.output.token_ids.append(token_id)
        if logprobs is not None:
            self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + logprobs.logprob
        if logprobs is not None and self.output.logprobs is not None and result.logprobs is not None:
            self.output.logprobs.append(logprob_map(self._tokenizer, logprobs))
            if not is_end:
                result.logprobs.append(self._position_logprobs(logprobs))
        if not is_end:
            self._add_text(result, self._detokenizer.feed(token_id))

    def _add_text(self, result: ChoiceDelta, text: str) -> None:
        if not text:
            return
        if not self._params.stop or len(self.output.token_ids) <= self._params.min_tokens:
            result.text += text
            return
        self._held += text
        match = _first_match(self._held, self._params.stop)
        if match is None:
            num_safe = len(self._held) - _partial_match_len(self._held, self._params.stop)
            result.text += self._held[:num_safe]
            self._held = self._held[num_safe:]
            return
        start, stop = match
        result.text += self._held[:start]
        self.is_stopped = True
        self._set_end(result, "stop", stop)

    def _finish(self, result: ChoiceDelta, delta: RequestDelta) -> None:
        self._add_text(result, self._detokenizer.flush())
        if self.is_stopped:
            return
        result.text += self._held
        is_stop_token = delta.stop_token_id in self._params.stop_token_ids
        reason = cast(FinishReason, delta.finish_reason)
        self._set_end(result, reason, delta.stop_token_id if is_stop_token else None)

    def _set_end(self, result: ChoiceDelta, reason: FinishReason, stop_reason: str | int | None) -> None:
        result.finish_reason = self.output.finish_reason = reason
        result.stop_reason = self.output.stop_reason = stop_reason

    def _position_logprobs(self, logprobs: TokenLogprobs) -> PositionLogprobs:
        return PositionLogprobs(
            chosen=self._token_choice(logprobs.token_id, logprobs.logprob),
            top=[self._token_choice(token_id, logprob) for token_id, logprob in logprobs.top],
        )

    def _token_choice(self, token_id: int, logprob: float) -> TokenChoice:
        raw = self._tokenizer.token_bytes(token_id)
        # A hidden token adds nothing to the text: joined, the bytes of all positions are the text's.
        shown = b"" if self._detokenizer.is_hidden(token_id) else raw
        return TokenChoice(raw.decode(errors="replace"), max(logprob, LOWEST_LOGPROB), list(shown))


def logprob_map(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> dict[int, Logprob]:
    """One position in the form of `CompletionOutput.logprobs`: the chosen token first, then the most likely
    ones."""
    ranked = [(logprobs.token_id, logprobs.logprob, logprobs.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(logprobs.top, start=1)]
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank in ranked:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        found.setdefault(token_id, Logprob(max(logprob, LOWEST_LOGPROB), rank, text))
    return found


def _first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Start of the stop string that is complete first, reading on from the left, and the string."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _partial_match_len(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string, but not all of it."""
    longest = min(max(map(len, stops)) - 1, len(text))
    for num_chars in range(longest, 0, -1):
        end = text[-num_chars:]
        if any(len(stop) > num_chars and stop.startswith(end) for stop in stops):
            return num_chars
    return 0
