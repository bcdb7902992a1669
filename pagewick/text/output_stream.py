"""OutputStream: turns the engine's deltas for one choice into the deltas that a client reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import cast

from msgspec import Struct, json

from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.outputs import CompletionOutput, FinishReason, Logprob, PartDelta, PartKind, join_parts, text_of
from pagewick.sampling_params import SamplingParams
from pagewick.text.detokenizer import Detokenizer
from pagewick.text.part_splitter import PartSplitter, Run, Splitting
from pagewick.text.stop_strings import StopStrings
from pagewick.text.tokenizer import Tokenizer

# Replaces minus infinity, which JSON cannot express, as OpenAI's API does.
LOWEST_LOGPROB = -9999.0
# Looked up once: see outputs.py.
_TEXT, _DROPPED = PartKind.TEXT, PartKind.DROPPED


class TokenChoice(Struct, array_like=True, gc=False):
    """A token that was or could have been sampled. is_hidden: it is not a part of the text."""

    spelling: bytes
    logprob: float
    is_hidden: bool = False

    @property
    def token(self) -> str:
        return self.spelling.decode(errors="replace")

    @property
    def shown(self) -> bytes:
        """The bytes of the text; joined, those of all positions are the whole text's."""
        return b"" if self.is_hidden else self.spelling


class PositionLogprobs(Struct, array_like=True):
    """One position of the text: the sampled token and the most likely tokens, most likely first."""

    chosen: TokenChoice
    top: list[TokenChoice]


class ChoiceDelta(Struct, gc=False):
    """The news of a choice. The concatenated fields of a choice's deltas are those of its CompletionOutput.

    num_reasoning_tokens: number of tokens that belong to thoughts.
    logprobs: log-probabilities of the tokens of the text, without the stop token; None if not requested.
    stop_reason: the stop string or stop token id that ended the choice, if any.
    """

    index: int
    parts: list[PartDelta] = []
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_reasoning_tokens: int = 0

    @property
    def text(self) -> str:
        """Joined text of the parts that are text."""
        return text_of(self.parts, _TEXT)

    @property
    def reasoning(self) -> str:
        """Joined text of the parts that are thoughts."""
        return text_of(self.parts, PartKind.REASONING)

    def add(self, later: ChoiceDelta) -> None:
        """Append the next delta to this one."""
        join_parts(self.parts, later.parts)
        self.num_reasoning_tokens += later.num_reasoning_tokens
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class OutputStream:
    """Follows one choice token by token: token ids -> text -> text up to a stop string -> parts.

    `output` is the choice so far. `is_stopped`: a stop string has ended the choice; the caller then aborts it in the
    engine, and later deltas are ignored. How the engine divides tokens into deltas does not change the text.

    keeps_logprobs: if false, `output` has the log-probabilities of hidden tokens only; the deltas have all others.
    splitting: makes the splitter for parts; None: everything is text. Stop strings are searched in the visible text,
    before it is split, except after a token of a kind without stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        index: int,
        splitting: Splitting | None = None,
        *,
        keeps_logprobs: bool = True,
    ) -> None:
        self._keeps_logprobs = keeps_logprobs
        wants_logprobs = params.logprobs is not None
        self.output = CompletionOutput(index=index, logprobs=[] if wants_logprobs else None)
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, is_kept=params.include_stop_str_in_output)
        splitter = None if splitting is None else splitting.splitter()
        self._parts = None if splitter is None else _Parts(tokenizer, splitter, self._detokenizer)
        # Text that is neither searched for stop strings nor split; its tokens are not looked at one by one.
        self._is_plain = splitter is None and not params.stop

    def feed(self, delta: RequestDelta) -> ChoiceDelta:
        """Read a delta of the engine; returns what it adds to the choice."""
        output = self.output
        result = ChoiceDelta(output.index, logprobs=None if output.logprobs is None else [])
        if output.finish_reason is not None:
            return result
        if delta.num_draft_tokens:
            output.num_draft_tokens = max(output.num_draft_tokens, delta.num_draft_tokens)
            output.num_accepted_tokens = max(output.num_accepted_tokens, delta.num_accepted_tokens)
        if self._is_plain and delta.finish_reason is None and not delta.logprobs:
            result.token_ids = token_ids = delta.token_ids
            output.token_ids += token_ids
            detokenizer = self._detokenizer
            text = detokenizer.feed(token_ids[0]) if len(token_ids) == 1 else detokenizer.feed_all(token_ids)
            if text:
                result.parts = [PartDelta(_TEXT, text)]
                output.add_text(text)
            return result
        logprobs = delta.logprobs
        end = None if delta.stop_token_id is None else len(delta.token_ids) - 1
        for place, token_id in enumerate(delta.token_ids):
            is_shown = place != end or self._params.include_stop_str_in_output
            self._add_token(result, token_id, logprobs[place] if logprobs else None, is_shown=is_shown)
            if self.is_stopped:
                break
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None and not self.is_stopped:
            self._finish(result, delta)
        if result.parts:
            output.add(result.parts)
        output.num_reasoning_tokens += result.num_reasoning_tokens
        return result

    def _add_token(self, result: ChoiceDelta, token_id: int, logprobs: TokenLogprobs | None, *, is_shown: bool) -> None:
        output = self.output
        result.token_ids.append(token_id)
        output.token_ids.append(token_id)
        if logprobs is not None:
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.logprob
        position = None
        if logprobs is not None and output.logprobs is not None:
            if self._keeps_logprobs or not is_shown:
                output.logprobs.append(logprob_map(self._tokenizer, logprobs))
            position = PositionLogprobs(
                chosen=self._token_choice(logprobs.token_id, logprobs.logprob),
                top=[self._token_choice(*one) for one in logprobs.top],
            )
        if not is_shown:
            return
        if self._parts is not None:
            self._add_marked_token(self._parts, result, token_id, position)
            return
        if position is not None and result.logprobs is not None:
            result.logprobs.append(position)
        _give(result, _TEXT, self._find_stop(result, self._detokenizer.feed(token_id)))

    def _add_marked_token(
        self, parts: _Parts, result: ChoiceDelta, token_id: int, position: PositionLogprobs | None
    ) -> None:
        mark = parts.mark_of(token_id)
        before = self._detokenizer.flush() if mark else ""
        shown = before + self._detokenizer.feed(token_id)
        if self._params.stop and not parts.has_stop_strings:
            safe = self._stops.flush() + shown
        else:
            safe = self._find_stop(result, shown)
        parts.add_text(before + mark if mark else shown[: len(shown) - self._stops.num_surplus])
        parts.add_token(result, position, is_partial=self._detokenizer.is_inside_character)
        parts.release(result, len(safe))
        if self.is_stopped:
            parts.finish(result, 0)
        elif parts.is_over:
            self._parts = None
            self._is_plain = not self._params.stop

    def _find_stop(self, result: ChoiceDelta, text: str) -> str:
        """Return the text that can be emitted; end the choice if the text so far contains a stop string."""
        if len(self.output.token_ids) <= self._params.min_tokens:
            return text
        safe = self._stops.feed(text)
        if self._stops.found is not None:
            self.is_stopped = True
            self._set_end(result, "stop", self._stops.found)
        return safe

    def _finish(self, result: ChoiceDelta, delta: RequestDelta) -> None:
        rest = self._detokenizer.flush()
        has_stop_strings = self._parts is None or self._parts.has_stop_strings
        safe = self._find_stop(result, rest) if has_stop_strings else self._stops.flush() + rest
        if not self.is_stopped:
            safe += self._stops.flush()
        if self._parts is None:
            _give(result, _TEXT, safe)
        else:
            self._parts.add_text(rest[: len(rest) - self._stops.num_surplus])
            self._parts.finish(result, len(safe))
        if self.is_stopped:
            return
        is_stop_token = delta.stop_token_id in self._params.stop_token_ids
        reason = cast(FinishReason, delta.finish_reason)
        self._set_end(result, reason, delta.stop_token_id if is_stop_token else None)

    def _set_end(self, result: ChoiceDelta, reason: FinishReason, stop_reason: str | int | None) -> None:
        result.finish_reason = self.output.finish_reason = reason
        result.stop_reason = self.output.stop_reason = stop_reason

    def _token_choice(self, token_id: int, logprob: float) -> TokenChoice:
        spelling, is_hidden = self._tokenizer.token_bytes(token_id), self._detokenizer.is_hidden(token_id)
        return TokenChoice(spelling, max(logprob, LOWEST_LOGPROB), is_hidden)


class _Parts:
    """Passes a choice's text through a PartSplitter, and emits it as far as no stop string may begin there.

    StopStrings reads the visible text; the splitter reads the same text with marks in place of some tokens. This class
    combines the two results: runs of visible text, each with its kind.
    """

    def __init__(self, tokenizer: Tokenizer, splitter: PartSplitter, detokenizer: Detokenizer) -> None:
        self._splitter = splitter
        self._shown = {
            mark: "" if detokenizer.is_hidden(token_id) else tokenizer.token_bytes(token_id).decode(errors="replace")
            for token_id, mark in splitter.marks.items()
        }
        self._runs: deque[Run] = deque()
        self._num_safe = 0  # further characters that may be emitted
        self._undecided: list[PositionLogprobs | None] = []  # tokens whose kind is not known yet
        self._num_held = 0  # characters that the splitter has not given back
        self._has_text = self._is_text = False  # whether it gave back text at the last token, and text of this token

    @property
    def is_over(self) -> bool:
        """Whether all further output is text and nothing is left to emit."""
        return self._splitter.is_over and not self._runs

    @property
    def has_stop_strings(self) -> bool:
        """Whether a stop string in the next token's text ends the choice."""
        kind = self._splitter.kind
        return kind is None or kind.has_stop_strings

    def mark_of(self, token_id: int) -> str:
        """Return the mark that the splitter reads in place of the token's text; empty for most tokens."""
        return "" if self._splitter.is_over else self._splitter.marks.get(token_id, "")

    def add_text(self, marked: str) -> None:
        runs = self._splitter.feed(marked)
        self._has_text, num_given = False, 0
        for run in runs:
            if not isinstance(run, PartDelta):
                num_given += len(run[1])
                self._has_text |= run[0] is _TEXT and run[1] != ""
        self._is_text = self._has_text and num_given > self._num_held
        self._num_held += len(marked) - num_given
        self._append(runs)

    def add_token(self, result: ChoiceDelta, position: PositionLogprobs | None, *, is_partial: bool) -> None:
        """Count the token whose text was added last. is_partial: its last character is incomplete, its kind open."""
        # White space behind a text may be undecided still, or belong to a call, but the text is not.
        if self._has_text and self._undecided:
            self._decide(result, _TEXT)
        self._undecided.append(position)
        if self._is_text:
            self._decide(result, _TEXT)
            return
        kind = self._splitter.kind
        if kind is not None and (self._splitter.is_over or not is_partial):
            self._decide(result, kind)

    def release(self, result: ChoiceDelta, num_safe: int) -> None:
        """Emit `num_safe` more characters of the visible text, as far as they are split."""
        self._num_safe += num_safe
        while self._runs and (self._num_safe or isinstance(self._runs[0], PartDelta)):
            run = self._runs.popleft()
            if isinstance(run, PartDelta):
                join_parts(result.parts, [run])
                continue
            kind, text = run
            given, left = text[: self._num_safe], text[self._num_safe :]
            self._num_safe -= len(given)
            if kind is not _DROPPED:
                _give(result, kind, given)
            if left:
                self._runs.appendleft((kind, left))

    def finish(self, result: ChoiceDelta, num_safe: int) -> None:
        """End the output."""
        self._append(self._splitter.flush())
        self._decide(result, self._splitter.kind or PartKind.TEXT)
        self.release(result, num_safe)

    def _append(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if isinstance(run, PartDelta):
                self._runs.append(PartDelta(run.kind, self._without_marks(run.text, is_json=bool(run.call)), run.call))
            elif text := self._without_marks(run[1]):
                self._runs.append((run[0], text))

    def _without_marks(self, text: str, *, is_json: bool = False) -> str:
        for mark, shown in self._shown.items():
            text = text.replace(mark, json.encode(shown).decode()[1:-1] if is_json else shown)
        return text

    def _decide(self, result: ChoiceDelta, kind: PartKind) -> None:
        if kind.is_reasoning:
            result.num_reasoning_tokens += len(self._undecided)
        if kind.has_logprobs and result.logprobs is not None:
            result.logprobs += [one for one in self._undecided if one is not None]
        self._undecided.clear()


def _give(result: ChoiceDelta, kind: PartKind, text: str) -> None:
    """Append text to the last part if that has the same kind, else as a new part."""
    if not text:
        return
    parts = result.parts
    if parts and parts[-1].kind is kind:
        parts[-1].text += text
    else:
        parts.append(PartDelta(kind, text))


def logprob_map(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> dict[int, Logprob]:
    """Convert one position to an entry of `CompletionOutput.logprobs`: the sampled token, then the most likely."""
    ranked = [(logprobs.token_id, logprobs.logprob, logprobs.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(logprobs.top, start=1)]
    found: dict[int, Logprob] = {}
    for token_id, logprob, rank in ranked:
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        found.setdefault(token_id, Logprob(max(logprob, LOWEST_LOGPROB), rank, text))
    return found
