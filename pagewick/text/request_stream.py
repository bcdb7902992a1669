"""RequestStream: turns the engine's deltas for one request into the deltas of its choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagewick import errors
from pagewick.engine.messages import EngineRequest, ImageInput, RequestDelta, RequestOptions
from pagewick.errors import EngineDeadError, EngineError, InvalidRequestError, PagewickError, QueueFullError
from pagewick.log import get_logger
from pagewick.outputs import CompletionOutput, FinishReason, PrefixMiss, RequestOutput
from pagewick.pooling_params import Scoring
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta, OutputStream, logprob_map
from pagewick.text.part_splitter import Splitting
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer

MAX_OPTION_BYTES = 256
MAX_TIMEOUT_S = 86400
PRIORITY_LIMIT = 2**31

_logger = get_logger(__name__)


class RequestStream:
    """Follows one request: text, stop strings and log-probabilities of its choices, and statistics of its prompt.

    With best_of the engine generates that many candidates. The stream then emits nothing before all are finished;
    `output` gets the n candidates with the highest mean log-probability per token (OpenAI's definition), best first.
    splitting: makes the splitters for parts of a response; None: everything is text. keeps_logprobs: see OutputStream.
    has_cache_salt: whether only requests with the same salt share this prompt's cached prefix. has_stopped: whether
    `take_stopped` has something to return.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: EngineRequest,
        params: SamplingParams,
        prompt: str | None,
        splitting: Splitting | None = None,
        *,
        keeps_logprobs: bool = True,
    ) -> None:
        self.has_cache_salt = request.options.cache_salt is not None
        self._tokenizer = tokenizer
        self._candidates = [
            OutputStream(tokenizer, params, index, splitting, keeps_logprobs=keeps_logprobs)
            for index in range(num_candidates(params))
        ]
        self._held: list[list[ChoiceDelta]] = [[] for _ in self._candidates]
        self._is_ranked = len(self._candidates) > params.n
        self.has_stopped = False
        self._stopped: list[tuple[str, int]] = []
        outputs = [one.output for one in self._candidates]
        if self._is_ranked:
            outputs = [CompletionOutput(index) for index in range(params.n)]
        self.output = RequestOutput(request.request_id, prompt, request.prompt_token_ids, outputs)
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens, including those of candidates that best_of discards."""
        return sum(len(one.output.token_ids) for one in self._candidates)

    @property
    def num_draft_tokens(self) -> int:
        return sum(one.output.num_draft_tokens for one in self._candidates)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(one.output.num_accepted_tokens for one in self._candidates)

    def feed(self, delta: RequestDelta) -> list[ChoiceDelta]:
        """Read a delta of the engine; returns what it adds. The caller raises its error, if any: see `failure_of`."""
        output = self.output
        if delta.num_cached_tokens > output.num_cached_tokens or delta.queue_s or delta.prefill_s:
            self._note_start(delta)
        if delta.prompt_logprobs or delta.prefix_miss is not None:
            self._note_prompt(delta)
        if delta.embedding:
            output.pooled = delta.embedding
        candidate = self._candidates[delta.choice_index]
        if candidate.output.finish_reason is not None:
            return []
        if delta.decode_s > output.decode_s:
            output.decode_s = delta.decode_s
        num_accepted = candidate.output.num_accepted_tokens
        change = candidate.feed(delta)
        if len(change.token_ids) < len(delta.token_ids):
            # A stop string has cut off the rest. Accepted draft tokens are the first tokens of a delta.
            most = num_accepted + len(change.token_ids)
            candidate.output.num_accepted_tokens = min(candidate.output.num_accepted_tokens, most)
        if candidate.is_stopped and delta.finish_reason is None:
            self.has_stopped = True
            self._stopped.append((self.output.request_id, delta.choice_index))
        if change.finish_reason is None and not self._is_ranked:
            return [change]
        return self._say([change])

    def end(self, reason: FinishReason) -> list[ChoiceDelta]:
        """Finish all unfinished choices."""
        changes = []
        for candidate in self._candidates:
            if candidate.output.finish_reason is None:
                candidate.output.finish_reason = reason
                changes.append(ChoiceDelta(candidate.output.index, finish_reason=reason))
        return self._say(changes) if changes else []

    def take_stopped(self) -> list[tuple[str, int]]:
        """Return (request id, choice index) of the choices that a stop string has ended since the last call.

        The engine does not see stop strings: the caller must abort these choices there.
        """
        stopped, self._stopped, self.has_stopped = self._stopped, [], False
        return stopped

    def _say(self, changes: list[ChoiceDelta]) -> list[ChoiceDelta]:
        self.output.finished = all(one.output.finish_reason is not None for one in self._candidates)
        if not self._is_ranked:
            return changes
        for change in changes:
            self._held[change.index].append(change)
        return self._rank() if self.output.finished else []

    def _rank(self) -> list[ChoiceDelta]:
        """Replace the outputs by the best candidates; returns one delta for each."""
        order = sorted(
            range(len(self._candidates)), key=lambda i: _mean_logprob(self._candidates[i].output), reverse=True
        )
        changes = []
        for index, place in enumerate(order[: len(self.output.outputs)]):
            self.output.outputs[index] = self._candidates[place].output
            self.output.outputs[index].index = index
            changes.append(ChoiceDelta(index))
            for change in self._held[place]:
                changes[-1].add(change)
        return changes

    def _note_start(self, delta: RequestDelta) -> None:
        output = self.output
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        output.queue_s = max(output.queue_s, delta.queue_s)
        output.prefill_s = max(output.prefill_s, delta.prefill_s)

    def _note_prompt(self, delta: RequestDelta) -> None:
        output = self.output
        if delta.prompt_logprobs and output.prompt_logprobs is not None:
            output.prompt_logprobs += [logprob_map(self._tokenizer, one) for one in delta.prompt_logprobs]
        if delta.prefix_miss is not None:
            miss = delta.prefix_miss
            output.prefix_miss = PrefixMiss(miss.position, miss.token_id, miss.cached_token_id)
            # Not the tokens: they are users' text.
            _logger.debug("request %s: the prefix cache knows it up to token %d", output.request_id, miss.position)


def num_candidates(params: SamplingParams) -> int:
    """Number of choices that the engine generates."""
    return max(params.n, params.best_of or 1)


def engine_request(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    seed: int,
    options: RequestOptions | None,
    strings: TokenStrings,
    constraint: Any = None,
    opening_ids: Sequence[int] = (),
    pooling: str = "",
    scoring: Scoring | None = None,
    images: Sequence[ImageInput] = (),
    adapter: str = "",
) -> EngineRequest:
    """Make the engine's request. The engine does not see text: it gets no stop strings, and other strings as tokens.

    options: accepted by `check_options`. Raises InvalidRequestError for a string that is not valid Unicode.
    """
    wanted = replace(params, stop=(), structured_outputs=None)
    if num_candidates(params) > params.n:
        logprobs = params.logprobs or 0
        wanted = replace(wanted, n=num_candidates(params), best_of=None, logprobs=logprobs)
    breaker_ids, breaker_mask = strings.dry_breakers(params)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=wanted,
        seed=seed,
        options=options or RequestOptions(),
        bad_word_ids=strings.bad_word_ids(params),
        dry_breaker_ids=breaker_ids,
        dry_breaker_mask=breaker_mask,
        constraint=constraint,
        opening_ids=list(opening_ids),
        pooling=pooling,
        label_ids=[] if scoring is None else list(scoring.label_ids),
        separator_id=-1 if scoring is None else scoring.separator_id,
        images=list(images),
        adapter=adapter,
    )


def check_options(options: RequestOptions) -> None:
    """Raises InvalidRequestError for a value out of range."""
    priority, timeout = options.priority, options.timeout_s
    if not isinstance(priority, int) or not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
        raise InvalidRequestError(f"priority must be a whole number of 32 bits; got {priority!r}", param="priority")
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout <= MAX_TIMEOUT_S):
        message = f"timeout must be seconds, more than 0 and at most {MAX_TIMEOUT_S}; got {timeout!r}"
        raise InvalidRequestError(message, param="timeout")
    for name, text in (("cache_salt", options.cache_salt), ("session_id", options.session_id)):
        if text is not None and not (isinstance(text, str) and 0 < _num_bytes(text) <= MAX_OPTION_BYTES):
            message = f"{name} must be a Unicode text of 1 to {MAX_OPTION_BYTES} bytes in UTF-8"
            raise InvalidRequestError(message, param=name)


def failure_of(delta: RequestDelta, prefix: str = "") -> PagewickError | None:
    """Return the exception that a delta reports, with `prefix` before its message; None if it reports none."""
    if delta.error is None:
        return None
    kind = getattr(errors, delta.error_kind, EngineError)
    assert issubclass(kind, PagewickError), "the engine broke the protocol"
    if kind is QueueFullError:
        return QueueFullError(prefix + delta.error, retry_after_s=max(delta.retry_after_s, 1))
    if kind is EngineDeadError and delta.retry_after_s:
        return EngineDeadError(prefix + delta.error, retry_after_s=delta.retry_after_s)
    return kind(prefix + delta.error)


def _mean_logprob(output: CompletionOutput) -> float:
    if output.cumulative_logprob is None:
        return -math.inf
    return output.cumulative_logprob / len(output.token_ids)


def _num_bytes(text: str) -> int:
    """Length in UTF-8; 0 for text with a lone surrogate, which cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0
