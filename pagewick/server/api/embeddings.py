"""Embeddings in the form of OpenAI's API, with further fields under the names that vLLM and the Rust servers have."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from msgspec import Raw, Struct

from pagewick.errors import InvalidRequestError
from pagewick.generation import Generation, run_all
from pagewick.pooling_params import PoolingParams
from pagewick.server.api.json_response import encoded
from pagewick.server.api.request_fields import one_of
from pagewick.server.core.limits import MAX_INPUTS, check_count
from pagewick.server.core.request import PromptsRequest, Serving

# From names of the core to those of this route.
_NAMES = {"prompt": "input", "prompt[]": "input[]", "messages": "input"}


class EmbeddingRequest(Struct, kw_only=True):
    """Asks for the embeddings of texts, or of lists of token ids.

    model: a name of the model; the default is the model that is served.
    input: a text, a list of token ids, or a list of either. encoding_format: base64 is that of little-endian float32
    numbers. dimensions: the first numbers of each vector, for models that were trained for it (Matryoshka).
    pooling: what a vector is made of, the hidden state of the last token or the mean of all; the default is what the
    model was trained for, as far as its file says so, else the last one.
    embedding_type: another name of pooling. normalize: whether a vector has the length 1, which is the default.
    truncate_prompt_tokens: cut the end of a text if its prompt has more tokens; -1: if it does not fit. priority,
    cache_salt, timeout, add_special_tokens: as for completions.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["cls", "last", "mean"] | None = None
    embedding_type: Literal["cls", "last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        one_of(pooling=self.pooling, embedding_type=self.embedding_type)

    def params(self) -> PoolingParams:
        pooling = self.pooling or self.embedding_type
        return PoolingParams(pooling=pooling, dimensions=self.dimensions, normalize=self.normalize is not False)

    def prompts_request(self) -> PromptsRequest:
        """Make the core's request. Raises InvalidRequestError."""
        return PromptsRequest(
            serving=Serving(self.priority, self.cache_salt, timeout_s=self.timeout),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens,
            sampling={"max_tokens": 0, "temperature": 0.0, "seed": 0},
            names=_NAMES,
            prompts=self._inputs(),
            pooling=self.params(),
        )

    def _inputs(self) -> list[str | list[int]]:
        given = [self.input] if isinstance(self.input, str) else self.input
        if len(set(map(type, given))) > 1:
            raise InvalidRequestError("input must not mix texts and token ids", param="input")
        inputs = cast(list[str | list[int]], [given] if given and isinstance(given[0], int) else given)
        check_count("input", len(inputs), MAX_INPUTS)
        for place, one in enumerate(inputs):
            if not one:
                message = f"input[{place}] is empty; an embedding needs a text, or at least one token"
                raise InvalidRequestError(message, param="input")
        return inputs


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
