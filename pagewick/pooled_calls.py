"""PooledCalls: the methods of LLM that make numbers of texts, embeddings, classes and scores, in place of text."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagewick.api_arguments import Prompt, all_prompts, refuse_images, request_arguments
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ContextLengthError
from pagewick.offline import EncodedPrompt, Job, OnStep
from pagewick.offline_jobs import Adapters, JobMaker, Options
from pagewick.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from pagewick.pooling_params import EMBEDDING, Classification, PoolingParams, Scoring
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
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        options: Options = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of one prompt or of many; parameters as in `generate`.

        pooling_params: None: the hidden state that the model was trained for, or the last one, normalized.
        truncate_prompt_tokens: cut the ends of texts so that prompts have at most this number of tokens, with those
        around the text; -1: as many as fit.
        """
        request_arguments("LLM.embed", others, _ARGUMENTS)
        self._check_open()
        pooling = (pooling_params or PoolingParams()).checked(self.info.embedding_size, self.info.embedding)
        jobs = self._jobs(self._encoded(prompts, truncate_prompt_tokens), pooling, options, priority, lora_request)
        return [EmbeddingRequestOutput.of(output, pooling) for output in self._run(jobs, use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        options: Options = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the model's labels for one prompt or for many; parameters as in `embed`.

        pooling_params: only use_activation has a meaning here. Raises UnsupportedError for a model without labels, and
        as `generate` does.
        """
        request_arguments("LLM.classify", others, _ARGUMENTS)
        self._check_open()
        info = self.info
        use_activation = (pooling_params or PoolingParams()).for_classes()
        how = Classification.of(info.num_labels, info.problem_type, info.label_names, use_activation=use_activation)
        jobs = self._jobs(self._encoded(prompts, truncate_prompt_tokens), how, options, priority, lora_request)
        return [ClassificationRequestOutput.of(output, how) for output in self._run(jobs, use_tqdm)]

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
        encoded: list[EncodedPrompt] = []
        names = itertools.repeat("text_2") if isinstance(text_2, str) else map("text_2[{}]".format, itertools.count())
        named_pairs = list(zip(names, pairs_of(text_1, text_2, instruction), strict=False))
        for name, pair in named_pairs:
            try:
                token_ids = pairs.encode(pair, max_len=max_len, truncate_prompt_tokens=truncate_prompt_tokens)
            except ContextLengthError as error:
                error.args = (f"{name}: {error}",)
                raise
            encoded.append(EncodedPrompt(None, token_ids))
        jobs = self._jobs(encoded, scoring, options, priority, lora_request)
        jobs = [replace(job, name=name) for job, (name, _) in zip(jobs, named_pairs, strict=True)]
        return [ScoringRequestOutput.of(output, scoring) for output in self._run(jobs, use_tqdm)]

    def _encoded(self, prompts: Prompt | Sequence[Prompt], limit: int | None) -> list[EncodedPrompt]:
        given = all_prompts(prompts)
        refuse_images(given)
        return [self._maker.encode_beginning(prompt, limit) for prompt in given]

    def _jobs(
        self,
        prompts: Sequence[EncodedPrompt],
        pooling: PoolingParams | Classification | Scoring,
        options: Options,
        priority: int | Sequence[int] | None,
        lora_request: Adapters,
    ) -> list[Job]:
        fields = PlanFields(pooling=pooling)
        return self._maker.jobs(
            prompts, EMBEDDING, options, priority=priority, lora_request=lora_request, fields=fields
        )
