"""What a user gets back from LLM and AsyncEngine; names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """One candidate at one position: its log-probability (natural logarithm), its rank from 1, its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    reasoning: its thoughts, if they were to be told apart; `text` is then without them. num_reasoning_tokens: how many
        tokens come before the first of the text, the tags' among them; 0 without a thought.
    logprobs: per output token a map from token id to Logprob, the chosen token's first; None if not asked for.
    finish_reason: None while the choice is running.
    stop_reason: the stop string or stop token id that ended it, if one did.
    cumulative_logprob: the sum of its tokens' log-probabilities; None if they are not known.
    num_draft_tokens: how many tokens speculation guessed for it. num_accepted_tokens: how many of them it kept.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    reasoning: str = ""
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Why no more of a prompt was found in the prefix cache.

    position: of the first prompt token that differs from the closest cached prefix. token_id: the prompt's there.
    cached_token_id: the cached prefix's, which may be another user's; None if that prefix ends there.
    """

    position: int
    token_id: int
    cached_token_id: int | None


@dataclass(slots=True)
class RequestOutput:
    """A request and what has come of it so far.

    num_cached_tokens: how many of the prompt's tokens were found in the prefix cache.
    prompt_logprobs: per prompt token a map as in CompletionOutput.logprobs; None for the first token.
    prefix_miss: where and why the prefix cache knew no further; None if it was not asked or knew the whole prompt.
    queue_s: seconds until it was first scheduled. prefill_s: seconds from then to its first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prefix_miss: PrefixMiss | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
