"""The OpenAI API: chat completions, completions, models.

A handler reads the body, makes token ids of it, starts a request and answers, at once or as a stream of chunks. Leaving
early, because the client left or because of an error, aborts the request in the engine.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewick.async_llm import AsyncEngine
from pagewick.log import get_logger
from pagewick.server.chat_answer import chat_choices, chat_chunks
from pagewick.server.completion_answer import completion_choices, completion_chunks
from pagewick.server.errors import ApiError
from pagewick.server.limits import read_body
from pagewick.server.metrics import Metrics
from pagewick.server.protocol import ChatCompletionRequest, CompletionRequest, decode_request
from pagewick.server.responses import ChatCompletion, ChatCompletionChunk, Completion, ModelCard, ModelList
from pagewick.server.sse import EventStream, run_while_connected
from pagewick.server.usage import usage_of

_logger = get_logger(__name__)
_encoder = msgspec.json.Encoder()

_MAX_IGNORED_NAMES = 16


class OpenAIApi:
    """The handlers, and what they share."""

    def __init__(self, engine: AsyncEngine, model_name: str, metrics: Metrics, *, keep_alive_s: float) -> None:
        self._engine = engine
        self._model_name = model_name
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._created = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body, ignored = decode_request(await read_body(request), ChatCompletionRequest)
        self._check_model(body.model)
        params = body.sampling_params(self._engine.default_params)
        await self._engine.prepare(params)
        token_ids = await self._engine.encode_chat(
            body.plain_messages(), chat_template_kwargs=body.chat_template_kwargs
        )
        options = body.options(fairness_key_of(request))
        generation = self._engine.request(token_ids, params, options=options, on_delta=self._metrics.observer())
        answer = self._new_answer("chatcmpl")
        if body.stream:
            new_chunk = partial(ChatCompletionChunk, **answer)
            chunks = chat_chunks(generation, new_chunk, wants_usage=body.wants_usage_chunk)
            return EventStream(chunks, headers=_headers(ignored), keep_alive_s=self._keep_alive_s)
        choices = await run_while_connected(request, chat_choices(generation, wants_logprobs=bool(body.logprobs)))
        completion = ChatCompletion(**answer, choices=choices, usage=usage_of([generation]))
        if generation.output.prompt_logprobs is not None:
            completion.prompt_logprobs = generation.output.prompt_logprobs
        return _json(completion, ignored)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body, ignored = decode_request(await read_body(request), CompletionRequest)
        self._check_model(body.model)
        params = body.sampling_params(self._engine.default_params)
        await self._engine.prepare(params)
        options = body.options(fairness_key_of(request))
        generations = []
        for prompt in body.prompts():
            token_ids = await self._engine.encode(prompt) if isinstance(prompt, str) else prompt
            on_delta = self._metrics.observer()
            generations.append(self._engine.request(token_ids, params, options=options, on_delta=on_delta))
        answer = self._new_answer("cmpl")
        if body.stream:
            new_chunk = partial(Completion, **answer)
            chunks = completion_chunks(generations, params, new_chunk, wants_usage=body.wants_usage_chunk)
            return EventStream(chunks, headers=_headers(ignored), keep_alive_s=self._keep_alive_s)
        choices = await run_while_connected(request, completion_choices(generations, params))
        return _json(Completion(**answer, choices=choices, usage=usage_of(generations)), ignored)

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models"""
        return _json(ModelList([self._model_card()]))

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        self._check_model(request.path_params["id"])
        return _json(self._model_card())

    def _new_answer(self, kind: str) -> dict[str, Any]:
        """What an answer begins with, and all its chunks have in common."""
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._model_name}

    def _model_card(self) -> ModelCard:
        info = self._engine.info
        return ModelCard(
            id=self._model_name, created=self._created, root=self._model_name, max_model_len=info.max_model_len
        )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            message = f"the model {name[:200]!r} does not exist; this server has {self._model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def fairness_key_of(request: Request) -> str:
    """Whose request it is, for equal shares. Nothing that a client may choose; so far nobody is told from others."""
    return ""


def _json(content: msgspec.Struct, ignored: Sequence[str] = ()) -> Response:
    return Response(_encoder.encode(content), media_type="application/json", headers=_headers(ignored))


def _headers(ignored: Sequence[str]) -> dict[str, str]:
    """Names the request's fields that had no effect. They are a user's words: only harmless characters pass."""
    if not ignored:
        return {}
    names = ", ".join(re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in ignored[:_MAX_IGNORED_NAMES])
    _logger.info("ignored request fields: %s", names)
    return {"x-pagewick-ignored": names}
