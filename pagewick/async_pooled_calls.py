"""AsyncPooledCalls: the methods of AsyncEngine that make numbers of texts in place of text, as those of PooledCalls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from pagewick import api_arguments
from pagewick.async_prompts import AsyncPrompts
from pagewick.engine.messages import RequestOptions
from pagewick.engine.model_info import ModelInfo
from pagewick.generation import Generation
from pagewick.lora_request import LoRARequest
from pagewick.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from pagewick.pooling_params import EMBEDDING, Classification, PoolingParams, Scoring
from pagewick.sampling_params import SamplingParams
from pagewick.text.pair_prompts import pairs_of, scoring_of
from pagewick.text.prompts import EncodeOptions
from pagewick.text.request_maker import PlanFields, RequestPlan
from pagewick.text.truncation import tokens_to_keep


class AsyncPooledCalls(AsyncPrompts, ABC):
    """The methods, over those of AsyncEngine that run prompts."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @abstractmethod
    async def prepare(
        self, params: SamplingParams, *, options: RequestOptions | None = None, **fields: Unpack[PlanFields]
    ) -> RequestPlan: ...

    @abstractmethod
    def generation(
        self,
        prompt_token_ids: list[int],
        plan: RequestPlan,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> Generation: ...

    @abstractmethod
    async def _adapter(self, wanted: LoRARequest | None) -> str: ...

    async def embed(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of one prompt.

        pooling_params, truncate_prompt_tokens: as for LLM.embed; others and errors as in `generate`.
        """
        pooling = (pooling_params or PoolingParams()).checked(self.info.embedding_size, self.info.embedding)
        token_ids = await self._beginning(prompt, truncate_prompt_tokens)
        found = await self._pooled(prompt, token_ids, pooling, request_id, options, lora_request)
        return EmbeddingRequestOutput.of(found, pooling)

    def classification(self, use_activation: bool | None = None) -> Classification:
        """Return how the model classifies texts; see Classification.of."""
        info = self.info
        return Classification.of(info.num_labels, info.problem_type, info.label_names, use_activation=use_activation)

    async def classify(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ClassificationRequestOutput:
        """Return the probabilities of the model's labels for one prompt.

        pooling_params, truncate_prompt_tokens: as for LLM.classify; others and errors as in `generate`.
        """
        how = self.classification((pooling_params or PoolingParams()).for_classes())
        token_ids = await self._beginning(prompt, truncate_prompt_tokens)
        found = await self._pooled(prompt, token_ids, how, request_id, options, lora_request)
        return ClassificationRequestOutput.of(found, how)

    def scoring(self) -> Scoring:
        """Return how the model scores pairs of texts. Raises UnsupportedError for one that is no reranker."""
        return scoring_of(self.pairs, self.info.num_labels, self.info.label_activation)[1]

    async def score(
        self,
        text_1: str,
        text_2: str,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ScoringRequestOutput:
        """Return how well a document, text_2, matches a query; as LLM.score, and others and errors as in `generate`."""
        scoring = self.scoring()
        (pair,) = pairs_of([text_1], [text_2], instruction)
        token_ids = await self.encode_pair(pair, truncate_prompt_tokens=truncate_prompt_tokens)
        adapter = await self._adapter(lora_request)
        plan = await self.prepare(EMBEDDING, options=options, pooling=scoring, adapter=adapter)
        generation = self.generation(token_ids, plan, request_id=request_id)
        return ScoringRequestOutput.of(await generation.whole(), scoring)

    async def _beginning(
        self, prompt: str | Sequence[int] | Mapping[str, Any], truncate_prompt_tokens: int | None
    ) -> list[int]:
        """Return the tokens of a prompt, the first ones if it is truncated."""
        api_arguments.refuse_images([prompt])
        text, given = api_arguments.prompt_parts(prompt)
        if given is None:
            how = EncodeOptions(truncate_prompt_tokens=truncate_prompt_tokens, num_output_tokens=0)
            return await self.encode(text or "", keeps_beginning=True, **how)
        return given[: tokens_to_keep(truncate_prompt_tokens, self.info.max_model_len)]

    async def _pooled(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        token_ids: list[int],
        pooling: PoolingParams | Classification,
        request_id: str | None,
        options: RequestOptions | None,
        lora_request: LoRARequest | None,
    ) -> RequestOutput:
        text, _ = api_arguments.prompt_parts(prompt)
        adapter = await self._adapter(lora_request)
        plan = await self.prepare(EMBEDDING, options=options, pooling=pooling, adapter=adapter)
        return await self.generation(token_ids, plan, prompt=text, request_id=request_id).whole()
