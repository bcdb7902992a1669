"""UsageReport: what a request took, in tokens and in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from pagewick.generation import Generation
from pagewick.server.api.protocol import GenerationRequest
from pagewick.server.api.responses import CompletionTokensDetails, PromptTokensDetails, Timings, Usage


class UsageReport:
    """The fields `usage` and `timings` of a response or its chunks, as far as the request asks for them.

    Tokens are those of all prompts and all choices; a prompt counts once however many choices it has. With best_of all
    candidates count, as in OpenAI's API. In `timings`, which is llama.cpp's, the time of the first token is part of the
    prompt's.
    """

    def __init__(
        self, request: GenerationRequest, generations: Sequence[Generation], *, are_rounds: bool = False
    ) -> None:
        """are_rounds: the Generations, of which more may come, run one after another and not at the same time."""
        self._request = request
        self._generations = generations
        self._are_rounds = are_rounds

    @property
    def is_same_for_chunks(self) -> bool:
        """Whether all chunks but the last have the same report."""
        return not (self._request.wants_usage_always or self._request.timings_per_token)

    def for_response(self) -> dict[str, Any]:
        return {"usage": self._usage(), **self._timings()}

    def for_chunk(self) -> dict[str, Any]:
        """`usage` is null in all chunks but the last, if that has it."""
        if not self._request.wants_usage_chunk:
            return self._timings()
        return {"usage": self._usage() if self._request.wants_usage_always else None, **self._timings()}

    def for_last_chunk(self) -> dict[str, Any] | None:
        """Return the fields of a chunk without choices; None if the stream has no such chunk."""
        return self.for_response() if self._request.wants_usage_chunk else None

    def _usage(self) -> Usage:
        generations = self._generations
        num_prompt_tokens = sum(len(one.output.prompt_token_ids) for one in generations)
        num_output_tokens = sum(one.stream.num_output_tokens for one in generations)
        num_accepted_tokens = sum(one.stream.num_accepted_tokens for one in generations)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(
                sum(one.output.num_cached_tokens for one in generations), self._miss_position()
            ),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=num_accepted_tokens,
                rejected_prediction_tokens=sum(one.stream.num_draft_tokens for one in generations)
                - num_accepted_tokens,
                reasoning_tokens=sum(
                    choice.num_reasoning_tokens for one in generations for choice in one.output.outputs
                ),
            ),
        )

    def _miss_position(self) -> int | UnsetType:
        """Where the prefix cache stopped matching; only for a single prompt that has a cache_salt of its client's.

        Any other prompt is compared with those of other users: a client that is told where it departs from the closest
        one can find out that prompt, token by token.
        """
        if len(self._generations) != 1 or self._request.cache_salt is None:
            return UNSET
        miss = self._generations[0].output.prefix_miss
        return UNSET if miss is None else miss.position

    def _timings(self) -> dict[str, Any]:
        if not self._request.timings_per_token:
            return {}
        return {"timings": timings_of(self._generations, are_rounds=self._are_rounds)}


def timings_of(generations: Sequence[Generation], *, are_rounds: bool = False) -> Timings:
    """Return the times of requests. are_rounds: they ran one after another and not at the same time."""
    num_cached_tokens = sum(one.output.num_cached_tokens for one in generations)
    num_prompt_tokens = sum(len(one.output.prompt_token_ids) for one in generations) - num_cached_tokens
    num_output_tokens = sum(one.stream.num_output_tokens for one in generations)
    total: Callable[[Iterable[float]], float] = sum if are_rounds else _longest
    prompt_s = total(one.output.prefill_s for one in generations)
    output_s = total(one.output.decode_s for one in generations)
    num_first_tokens = sum(one.stream.num_output_tokens > 0 for one in generations)
    return Timings(
        cache_n=num_cached_tokens,
        prompt_n=num_prompt_tokens,
        prompt_ms=prompt_s * 1e3,
        prompt_per_second=_rate(num_prompt_tokens, prompt_s),
        predicted_n=num_output_tokens,
        predicted_ms=output_s * 1e3,
        predicted_per_second=_rate(num_output_tokens - num_first_tokens, output_s),
    )


def _longest(times_s: Iterable[float]) -> float:
    return max(times_s, default=0.0)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
