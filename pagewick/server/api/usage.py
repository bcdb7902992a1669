"""Figures: what a request took, in tokens and in time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from pagewick.generation import Generation
from pagewick.server.api.protocol import GenerationRequest
from pagewick.server.api.responses import CompletionTokensDetails, PromptTokensDetails, Timings, Usage
from pagewick.text.output_stream import ChoiceDelta


class Figures:
    """What the client of a request wants to know of it beside the text, in an answer or in chunks."""

    def __init__(self, request: GenerationRequest, generations: Sequence[Generation]) -> None:
        self._request = request
        self._generations = generations
        self._stopwatch = Stopwatch(generations) if request.timings_per_token else None

    def observe(self, delta: ChoiceDelta) -> None:
        """To be called with each delta, as it comes."""
        if self._stopwatch is not None:
            self._stopwatch.observe(delta)

    def of_answer(self) -> dict[str, Any]:
        return {"usage": self._usage(), **self._timings()}

    def of_chunk(self) -> dict[str, Any]:
        """`usage` is null in all chunks but the last, if that has it."""
        if not self._request.wants_usage_chunk:
            return self._timings()
        return {"usage": self._usage() if self._request.wants_usage_always else None, **self._timings()}

    def of_last_chunk(self) -> dict[str, Any] | None:
        """For a chunk without choices; None if there is to be none."""
        return self.of_answer() if self._request.wants_usage_chunk else None

    def _usage(self) -> Usage:
        return usage_of(self._generations, has_salt=self._request.cache_salt is not None)

    def _timings(self) -> dict[str, Any]:
        return {} if self._stopwatch is None else {"timings": self._stopwatch.timings()}


class Stopwatch:
    """Times one request for llama.cpp's `timings`: to be shown each of its deltas."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._first: float | None = None
        self._latest = 0.0
        self._num_first_tokens = 0

    def observe(self, delta: ChoiceDelta) -> None:
        if not delta.token_ids:
            return
        self._latest = time.perf_counter()
        if self._first is None:
            self._first = self._latest
            self._num_first_tokens = len(delta.token_ids)

    def timings(self) -> Timings:
        """So far. What is generated is timed from the first token on, which counts to the prompt's time."""
        num_prompt_tokens = sum(len(one.output.prompt_token_ids) for one in self._generations)
        num_cached_tokens = sum(one.output.num_cached_tokens for one in self._generations)
        num_output_tokens = sum(one.stream.num_output_tokens for one in self._generations)
        prompt_s = max((one.output.prefill_s for one in self._generations), default=0.0)
        output_s = 0.0 if self._first is None else self._latest - self._first
        return Timings(
            cache_n=num_cached_tokens,
            prompt_n=num_prompt_tokens - num_cached_tokens,
            prompt_ms=prompt_s * 1e3,
            prompt_per_second=_rate(num_prompt_tokens - num_cached_tokens, prompt_s),
            predicted_n=num_output_tokens,
            predicted_ms=output_s * 1e3,
            predicted_per_second=_rate(num_output_tokens - self._num_first_tokens, output_s),
        )


def usage_of(generations: Sequence[Generation], *, has_salt: bool = False) -> Usage:
    """Tokens of all prompts and of all choices; a prompt counts once however many choices it has.

    With best_of all candidates count, as in OpenAI's API. has_salt: the request brought a cache_salt.
    """
    num_prompt_tokens = sum(len(one.output.prompt_token_ids) for one in generations)
    num_output_tokens = sum(one.stream.num_output_tokens for one in generations)
    num_accepted_tokens = sum(one.stream.num_accepted_tokens for one in generations)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            sum(one.output.num_cached_tokens for one in generations), _miss_position(generations, has_salt)
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=num_accepted_tokens,
            rejected_prediction_tokens=sum(one.stream.num_draft_tokens for one in generations) - num_accepted_tokens,
            reasoning_tokens=sum(choice.num_reasoning_tokens for one in generations for choice in one.output.outputs),
        ),
    )


def _miss_position(generations: Sequence[Generation], has_salt: bool) -> int | UnsetType:
    """Only for a prompt with a cache_salt of its client's, and without the token that the cache has there.

    Every other prompt is compared with those of other users: who is told where it leaves the closest one finds out that
    one, token by token.
    """
    if len(generations) != 1 or not has_salt:
        return UNSET
    miss = generations[0].output.prefix_miss
    return UNSET if miss is None else miss.position


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
