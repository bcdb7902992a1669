"""Whether a request can ever be served: asked in the HTTP process before the first byte, and again by the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from pagewick.engine.beam_search import BeamSearch
from pagewick.engine.messages import EngineRequest, ModelInfo
from pagewick.errors import ContextLengthError, InvalidRequestError


def check_request(request: EngineRequest, info: ModelInfo) -> None:
    """Raises InvalidRequestError for an empty prompt or unknown ids, ContextLengthError for one that cannot fit."""
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
    for name, token_ids in _token_ids(request):
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"token id {wrong} is not in the vocabulary of {info.vocab_size} tokens", param=name
            )
    params = request.params
    num_stop_tokens = len({*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)})
    if params.use_beam_search and BeamSearch.num_candidates(params.n, num_stop_tokens) > info.vocab_size:
        raise InvalidRequestError(
            f"a beam search of width {params.n} with {num_stop_tokens} stop tokens needs a larger vocabulary than "
            f"{info.vocab_size}; lower n",
            param="n",
        )
    num_output_tokens = request.params.max_tokens or 1
    if num_prompt_tokens + num_output_tokens > info.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + num_output_tokens} tokens ({num_prompt_tokens} in the prompt, {num_output_tokens} "
            "in the completion). Shorten the prompt or lower max_tokens.",
            param="messages" if num_prompt_tokens >= info.max_model_len else "max_tokens",
        )


def _token_ids(request: EngineRequest) -> Iterator[tuple[str, Iterable[int]]]:
    """Every token id in a request, with the name of its field."""
    params = request.params
    yield "prompt", request.prompt_token_ids
    yield "stop_token_ids", params.stop_token_ids
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "logit_bias", params.logit_bias or ()
    yield "bad_words", chain.from_iterable(request.bad_word_ids)
    yield "dry_sequence_breakers", chain.from_iterable(request.dry_breaker_ids)
