"""RequestMaker: what was asked for to what the engine is asked, and the stream that reads its answer."""

from __future__ import annotations

from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.sampling_params import SamplingParams
from pagewick.text.reasoning import Reasoning, ReasoningTags
from pagewick.text.request_stream import RequestStream, engine_request
from pagewick.text.thinking_budget import ThinkingBudget
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer


class RequestMaker:
    """For one model, whose reasoning tags these are; may be used by several threads at once.

    vocab_size: the model's, which may be another than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, tags: ReasoningTags | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        self._strings = TokenStrings(tokenizer, vocab_size)
        self._budget = ThinkingBudget(tokenizer, tags, vocab_size)

    def prepare(self, params: SamplingParams, *, thinking_budget: int | None = None) -> None:
        """Look up what takes a while the first time, so that `make` is quick. Raises InvalidRequestError as it does."""
        self._strings.dry_breaker_ids(params)
        if thinking_budget is not None:
            self._budget.prepare()

    def make(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        prompt: str | None = None,
        options: RequestOptions | None = None,
        split_reasoning: bool = False,
        thinking_budget: int | None = None,
    ) -> tuple[EngineRequest, RequestStream]:
        """The engine's request, not yet checked against its limits, and the stream of its answer.

        split_reasoning: tell thoughts from text, if the model has tags for them. thinking_budget: most tokens of
        thought. Raises InvalidRequestError for a wrong option, a string that is no text, or a budget for a model that
        has no tags or cannot write its closing tag.
        """
        reasoning = constraint = None
        if self._tags is not None and (split_reasoning or thinking_budget is not None):
            reasoning = Reasoning.after(prompt_token_ids, self._tags, self._tokenizer)
        if thinking_budget is not None:
            constraint = self._budget.constraint(thinking_budget, reasoning, params)
        request = engine_request(
            request_id,
            prompt_token_ids,
            params,
            seed=seed,
            options=options,
            strings=self._strings,
            constraint=constraint,
        )
        stream = RequestStream(self._tokenizer, request, params, prompt, reasoning if split_reasoning else None)
        return request, stream
