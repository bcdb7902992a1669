"""The OpenAI API: chat completions, completions, models.

A handler reads the body, makes token ids of it, starts a request and answers, at once or as a stream of chunks. Leaving
early, because the client left or because of an error, aborts the request in the engine.
"""

from __future__ import annotations

import codecs
import re
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewick.async_llm import AsyncEngine
from pagewick.generation import Generation, interleave
from pagewick.log import get_logger
from pagewick.sampling_params import SamplingParams
from pagewick.server.errors import ApiError
from pagewick.server.limits import read_body
from pagewick.server.metrics import Metrics
from pagewick.server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionTokensDetails,
    ContentLogprob,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    TokenLogprob,
    Usage,
    decode_request,
)
from pagewick.server.sse import EventStream, run_while_connected
from pagewick.text.output_stream import PositionLogprobs

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
        token_ids = await self._engine.encode_chat(
            body.plain_messages(), chat_template_kwargs=body.chat_template_kwargs
        )
        generation = self._engine.request(token_ids, params, on_delta=self._metrics.observer())
        answer = self._new_answer("chatcmpl")
        if body.stream:
            new_chunk = partial(ChatCompletionChunk, **answer)
            chunks = _chat_chunks(generation, new_chunk, wants_usage=body.wants_usage_chunk)
            return EventStream(chunks, headers=_headers(ignored), keep_alive_s=self._keep_alive_s)
        choices = await run_while_connected(request, _chat_choices(generation, wants_logprobs=bool(body.logprobs)))
        return _json(ChatCompletion(**answer, choices=choices, usage=_usage([generation])), ignored)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body, ignored = decode_request(await read_body(request), CompletionRequest)
        self._check_model(body.model)
        params = body.sampling_params(self._engine.default_params)
        generations = []
        for prompt in body.prompts():
            token_ids = await self._engine.encode(prompt) if isinstance(prompt, str) else prompt
            generations.append(self._engine.request(token_ids, params, on_delta=self._metrics.observer()))
        answer = self._new_answer("cmpl")
        if body.stream:
            new_chunk = partial(Completion, **answer)
            chunks = _completion_chunks(generations, params, new_chunk, wants_usage=body.wants_usage_chunk)
            return EventStream(chunks, headers=_headers(ignored), keep_alive_s=self._keep_alive_s)
        choices = await run_while_connected(request, _completion_choices(generations, params))
        return _json(Completion(**answer, choices=choices, usage=_usage(generations)), ignored)

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


async def _chat_choices(generation: Generation, *, wants_logprobs: bool) -> list[ChatChoice]:
    """Run the request to its end."""
    logprobs: dict[int, list[PositionLogprobs]] = defaultdict(list)
    async with generation:
        async for delta in generation:
            logprobs[delta.index] += delta.logprobs or []
    return [
        ChatChoice(
            index=choice.index,
            message=AnswerMessage("assistant", choice.text),
            logprobs=_chat_logprobs(logprobs[choice.index]) if wants_logprobs else None,
            finish_reason=choice.finish_reason,
        )
        for choice in generation.output.outputs
    ]


async def _chat_chunks(
    generation: Generation, new_chunk: Callable[..., ChatCompletionChunk], *, wants_usage: bool
) -> AsyncGenerator[ChatCompletionChunk]:
    """Role, content, finish reason of each choice, then the usage if it is wanted.

    A token that completes no character gives no chunk; its log-probability goes with the next one.
    """
    if wants_usage:
        new_chunk = partial(new_chunk, usage=None)
    held: dict[int, list[PositionLogprobs]] = defaultdict(list)
    is_first = True
    async with generation:
        async for delta in generation:
            if is_first:
                for choice in generation.output.outputs:
                    yield new_chunk(choices=[ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))])
                is_first = False
            held[delta.index] += delta.logprobs or []
            if delta.text:
                logprobs = _chat_logprobs(held.pop(delta.index)) if delta.logprobs is not None else None
                yield new_chunk(choices=[ChatChunkChoice(delta.index, ChatDelta(content=delta.text), logprobs)])
            if delta.finish_reason is not None:
                logprobs = _chat_logprobs(held[delta.index]) if held[delta.index] else None
                yield new_chunk(choices=[ChatChunkChoice(delta.index, ChatDelta(), logprobs, delta.finish_reason)])
    if wants_usage:
        yield new_chunk(choices=[], usage=_usage([generation]))


async def _completion_choices(generations: Sequence[Generation], params: SamplingParams) -> list[CompletionChoice]:
    """Run the requests to their end. Choice i of prompt p has the index p * n + i."""
    logprobs: dict[int, _CompletionLogprobs] = defaultdict(_CompletionLogprobs)
    async with aclosing(interleave(generations)) as deltas:
        async for position, delta in deltas:
            logprobs[position * params.n + delta.index].add(delta.logprobs or [])
    return [
        CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None if params.logprobs is None else logprobs[index].take(),
            finish_reason=choice.finish_reason,
        )
        for index, choice in enumerate(choice for one in generations for choice in one.output.outputs)
    ]


async def _completion_chunks(
    generations: Sequence[Generation],
    params: SamplingParams,
    new_chunk: Callable[..., Completion],
    *,
    wants_usage: bool,
) -> AsyncGenerator[Completion]:
    """Text, with the last of it the finish reason, of each choice; then the usage if it is wanted."""
    if wants_usage:
        new_chunk = partial(new_chunk, usage=None)
    held: dict[int, _CompletionLogprobs] = defaultdict(_CompletionLogprobs)
    async with aclosing(interleave(generations)) as deltas:
        async for position, delta in deltas:
            index = position * params.n + delta.index
            held[index].add(delta.logprobs or [])
            if delta.text or delta.finish_reason is not None:
                logprobs = None if params.logprobs is None else held[index].take()
                yield new_chunk(choices=[CompletionChoice(index, delta.text, logprobs, delta.finish_reason)])
    if wants_usage:
        yield new_chunk(choices=[], usage=_usage(generations))


def _usage(generations: Sequence[Generation]) -> Usage:
    """Tokens of all prompts and of all choices; a prompt counts once however many choices it has."""
    num_prompt_tokens = sum(len(generation.output.prompt_token_ids) for generation in generations)
    num_output_tokens = sum(generation.num_output_tokens for generation in generations)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(one.output.num_cached_tokens for one in generations)),
        completion_tokens_details=CompletionTokensDetails(),
    )


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(
                token=one.chosen.token,
                logprob=one.chosen.logprob,
                bytes=one.chosen.bytes,
                top_logprobs=[TokenLogprob(other.token, other.logprob, other.bytes) for other in one.top],
            )
            for one in positions
        ]
    )


class _CompletionLogprobs:
    """Collects one choice's log-probabilities in the form of /v1/completions, where tokens have text offsets."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._positions: list[tuple[int, PositionLogprobs]] = []

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for one in positions:
            self._positions.append((self._offset, one))
            self._offset += len(self._decoder.decode(bytes(one.chosen.bytes)))

    def take(self) -> CompletionLogprobs:
        """What has been added since the last time."""
        taken, self._positions = self._positions, []
        return CompletionLogprobs(
            tokens=[one.chosen.token for _, one in taken],
            token_logprobs=[one.chosen.logprob for _, one in taken],
            # Best first, so that of tokens with the same text the best one is named.
            top_logprobs=[{other.token: other.logprob for other in reversed(one.top)} for _, one in taken],
            text_offset=[offset for offset, _ in taken],
        )


def _json(content: msgspec.Struct, ignored: Sequence[str] = ()) -> Response:
    return Response(_encoder.encode(content), media_type="application/json", headers=_headers(ignored))


def _headers(ignored: Sequence[str]) -> dict[str, str]:
    """Names the request's fields that had no effect. They are a user's words: only harmless characters pass."""
    if not ignored:
        return {}
    names = ", ".join(re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in ignored[:_MAX_IGNORED_NAMES])
    _logger.info("ignored request fields: %s", names)
    return {"x-pagewick-ignored": names}
