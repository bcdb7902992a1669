"""Embeddings in the form of OpenAI's API, with further fields under the names that vLLM and the Rust servers have."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import Raw, Struct

from pagewick.generation import Generation, run_all
from pagewick.pooling_params import PoolingParams
from pagewick.server.api.input_fields import InputFields
from pagewick.server.api.json_response import encoded
from pagewick.server.api.request_fields import one_of


class EmbeddingRequest(InputFields, kw_only=True):
    """Asks for the embeddings of texts, or of lists of token ids.

    encoding_format: base64 is that of little-endian float32 numbers. dimensions: the first numbers of each vector, for
    models that were trained for it (Matryoshka).
    pooling: what a vector is made of, the hidden state of the last token or the mean of all; the default is what the
    model was trained for, as far as its file says so, else the last one.
    embedding_type: another name of pooling. normalize: whether a vector has the length 1, which is the default.
    """

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["cls", "last", "mean"] | None = None
    embedding_type: Literal["cls", "last", "mean"] | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        one_of(pooling=self.pooling, embedding_type=self.embedding_type)

    def params(self) -> PoolingParams:
        pooling = self.pooling or self.embedding_type
        return PoolingParams(pooling=pooling, dimensions=self.dimensions, normalize=self.normalize is not False)


class Embedding(Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: str = "list"
    data: Sequence[Embedding | Raw]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True)
class EmbeddingResponse:
    """The response to a request, once all its prompts have been computed."""

    generations: Sequence[Generation]
    body: EmbeddingRequest
    model: str
    at_once: int

    async def whole(self) -> EmbeddingList:
        """Run the requests to their end. Each embedding is encoded by itself, since together they may be large."""
        await run_all(self.generations, self.at_once)
        data = [
            await encoded(partial(self._embedding, place), is_large=False) for place in range(len(self.generations))
        ]
        num_tokens = sum(len(one.output.prompt_token_ids) for one in self.generations)
        return EmbeddingList(
            data=data, model=self.model, usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        )

    def _embedding(self, place: int) -> Embedding:
        numbers = self.body.params().vector(self.generations[place].output.pooled)
        if self.body.encoding_format == "base64":
            return Embedding(index=place, embedding=base64.b64encode(numbers.astype("<f4").tobytes()).decode())
        return Embedding(index=place, embedding=numbers.tolist())
