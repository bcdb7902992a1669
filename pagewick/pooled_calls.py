"""PooledCalls: the methods of LLM that make numbers of texts, embeddings and scores, in place of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pagewick.api_arguments import Prompt, all_prompts, refuse_images, request_arguments
from pagewick.engine.model_info import ModelInfo
from pagewick.offline import EncodedPrompt, Job, OnStep
from pagewick.offline_jobs import Adapters, JobMaker, Options
from pagewick.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from pagewick.pooling_params import EMBEDDING, PoolingParams
from pagewick.text.pair_prompts import PairPrompts, pairs_of, scoring_of
from pagewick.text.request_maker import PlanFields

_ARGUMENTS = ("use_tqdm", "priority", "options", "lora_request")


class PooledCalls(ABC):
    """The methods, over those of LLM that run prompts. _pairs: None for a model that is no reranker."""

    _pairs: PairPrompts | None
    _maker: JobMaker

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _run(self, jobs: Sequence[Job], show_progress: bool, on_step: OnStep | None = None) -> list[RequestOutput]: ...

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        options: Options = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of one prompt or of many; parameters as in `generate`.

        pooling_params: None: the hidden state that the model was trained for, or the last one, normalized.
        """
        request_arguments("LLM.embed", others, _ARGUMENTS)
        self._check_open()
        given = all_prompts(prompts)
        refuse_images(given)
        pooling = (pooling_params or PoolingParams()).checked(self.info.embedding_size, self.info.embedding)
        jobs = self._maker.jobs(
            [self._maker.encode(prompt) for prompt in given],
            EMBEDDING,
            options,
            priority=priority,
            lora_request=lora_request,
            fields=PlanFields(pooling=pooling),
        )
        return [EmbeddingRequestOutput.of(output, pooling) for output in self._run(jobs, use_tqdm)]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        options: Options = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well documents match queries, by a reranker; other parameters as in `generate`.

        text_1: a query, which is compared with all documents, or one query for each. text_2: the documents.
        instruction: what makes a document match, for models that read one; None: the model's own.
        truncate_prompt_tokens: cut the ends of documents so that prompts have at most this number of tokens; -1: as
        many as fit. Raises UnsupportedError for a model that is no reranker, and as `generate` does.
        """
        request_arguments("LLM.score", others, _ARGUMENTS)
        self._check_open()
        pairs, scoring = scoring_of(self._pairs, self.info.num_labels, self.info.label_activation)
        max_len = self.info.max_model_len
        encoded = [
            EncodedPrompt(None, pairs.encode(pair, max_len=max_len, truncate_prompt_tokens=truncate_prompt_tokens))
            for pair in pairs_of(text_1, text_2, instruction)
        ]
        fields = PlanFields(pooling=scoring)
        jobs = self._maker.jobs(
            encoded, EMBEDDING, options, priority=priority, lora_request=lora_request, fields=fields
        )
        return [ScoringRequestOutput.of(output, scoring) for output in self._run(jobs, use_tqdm)]
