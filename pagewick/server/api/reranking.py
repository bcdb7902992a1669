"""Reranking in the form of Jina's and Cohere's APIs, and scores in the form of vLLM's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from pagewick.errors import InvalidRequestError
from pagewick.generation import Generation, run_all
from pagewick.pooling_params import Scoring
from pagewick.server.api.request_fields import one_of
from pagewick.server.core.limits import MAX_INPUTS, check_count
from pagewick.server.core.request import PromptsRequest, Serving
from pagewick.text.pair_prompts import Pair, pairs_of


class PairFields(Struct, kw_only=True):
    """The fields that both routes have.

    model: a name of the model; the default is the model that is served. instruction: what makes a document match, for
    models that read one, such as Qwen3-Reranker. instruct: another name of it. truncate_prompt_tokens: cut the end of a
    document if its prompt has more tokens; -1: if it does not fit. priority, cache_salt, timeout: as for completions.
    """

    model: str | None = None
    instruction: str | None = None
    instruct: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        one_of(instruction=self.instruction, instruct=self.instruct)

    def pairs(self) -> list[Pair]:
        """Return the pairs to score. Raises InvalidRequestError."""
        raise NotImplementedError

    @property
    def wanted_instruction(self) -> str | None:
        return self.instruct if self.instruction is None else self.instruction

    def prompts_request(self, scoring: Scoring, documents: str) -> PromptsRequest:
        """Make the core's request. documents: the client's name for them. Raises InvalidRequestError."""
        return PromptsRequest(
            serving=Serving(self.priority, self.cache_salt, timeout_s=self.timeout),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            sampling={"max_tokens": 0, "temperature": 0.0, "seed": 0},
            names={"prompt[]": f"{documents}[]"},
            prompts=self.pairs(),
            pooling=scoring,
        )


class Document(Struct):
    """A document that is an object. Other fields of it have no effect."""

    text: str


class RerankRequest(PairFields, kw_only=True):
    """Asks how well documents match a query.

    query: what documents are compared with. documents: texts, or objects with a text. top_n: return the best ones only;
    0 and the default: all. return_documents: whether each result has its document, which is the default.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def pairs(self) -> list[Pair]:
        check_count("documents", len(self.documents), MAX_INPUTS)
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequestError(f"top_n must be 0 or more; got {self.top_n}", param="top_n")
        return pairs_of(self.query, self.texts(), self.wanted_instruction, ("query", "documents"))


class ScoreRequest(PairFields, kw_only=True):
    """Asks how well texts match each other: one with each of several, or each with the one at its place.

    text_1: a query, or several. text_2: documents. queries, data_1: other names of text_1. documents, data_2: other
    names of text_2.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two fields that the client has sent. Raises InvalidRequestError if it has not sent both."""
        found = []
        for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")):
            one_of(**{name: getattr(self, name) for name in names})
            given = [name for name in names if getattr(self, name) is not None]
            if not given:
                raise InvalidRequestError(f"{names[0]} is missing; give a text, or several", param=names[0])
            found += given
        return found[0], found[1]

    def pairs(self) -> list[Pair]:
        first, second = self.names
        pairs = pairs_of(getattr(self, first), getattr(self, second), self.wanted_instruction, (first, second))
        check_count(second, len(pairs), MAX_INPUTS)
        return pairs


class ScoreUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class RerankResult(Struct, kw_only=True):
    """index: the document's place in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankList(Struct, kw_only=True):
    """results: the best first."""

    id: str
    object: str = "list"
    model: str
    results: Sequence[RerankResult]
    usage: ScoreUsage


class Score(Struct, kw_only=True):
    object: str = "score"
    index: int
    score: float


class ScoreList(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[Score]
    usage: ScoreUsage


@dataclass(frozen=True, slots=True)
class PairsResponse:
    """The response to a request, once all its prompts have been computed."""

    generations: Sequence[Generation]
    body: PairFields
    scoring: Scoring
    model: str
    at_once: int

    async def whole(self) -> RerankList | ScoreList:
        await run_all(self.generations, self.at_once)
        scores = [self.scoring.score(one.output.pooled) for one in self.generations]
        num_tokens = sum(len(one.output.prompt_token_ids) for one in self.generations)
        usage = ScoreUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        if isinstance(self.body, RerankRequest):
            return RerankList(usage=usage, results=_ranked(self.body, scores), **self._head("rerank"))
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreList(usage=usage, data=data, created=int(time.time()), **self._head("score"))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "model": self.model}


def _ranked(body: RerankRequest, scores: Sequence[float]) -> list[RerankResult]:
    """Return the results, those with equal scores in the order of the request."""
    texts = body.texts() if body.return_documents is not False else []
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        RerankResult(
            index=index,
            relevance_score=scores[index],
            document=Document(texts[index]) if texts else UNSET,
        )
        for index in order[: body.top_n or None]
    ]
