"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from pagewick.generation import Generation
from pagewick.server.responses import CompletionTokensDetails, PromptTokensDetails, Usage


def usage_of(generations: Sequence[Generation]) -> Usage:
    """Tokens of all prompts and of all choices; a prompt counts once however many choices it has.

    With best_of all candidates count, as in OpenAI's API.
    """
    num_prompt_tokens = sum(len(one.output.prompt_token_ids) for one in generations)
    num_output_tokens = sum(one.stream.num_output_tokens for one in generations)
    num_accepted_tokens = sum(one.stream.num_accepted_tokens for one in generations)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            sum(one.output.num_cached_tokens for one in generations), _miss_position(generations)
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=num_accepted_tokens,
            rejected_prediction_tokens=sum(one.stream.num_draft_tokens for one in generations) - num_accepted_tokens,
        ),
    )


def _miss_position(generations: Sequence[Generation]) -> int | UnsetType:
    """Only for a prompt with a cache_salt, and without the token that the cache has there.

    Every other prompt is compared with those of all users: who is told where it leaves the closest one finds out that
    one, token by token.
    """
    if len(generations) != 1 or not generations[0].stream.has_cache_salt:
        return UNSET
    miss = generations[0].output.prefix_miss
    return UNSET if miss is None else miss.position
