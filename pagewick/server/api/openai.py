"""The OpenAI API: chat completions, completions, models, and the conversations that are recorded.

A handler reads the body, makes token ids of it, starts a request and answers, at once or as a stream of chunks. Leaving
early, because the client left or because of an error, aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.async_llm import AsyncEngine
from pagewick.errors import ContextLengthError, InvalidRequestError
from pagewick.generation import Generation, OnDelta
from pagewick.sampling_params import SamplingParams
from pagewick.server.api.admission import Admission
from pagewick.server.api.chat_answer import ChatForm, chat_choices, chat_chunks
from pagewick.server.api.completion_answer import CompletionForm, completion_choices, completion_chunks
from pagewick.server.api.conversations import Conversations, Recording
from pagewick.server.api.decoding import decode_request
from pagewick.server.api.json_answer import headers_naming, json_answer
from pagewick.server.api.limits import check_prompt_logprobs
from pagewick.server.api.logprobs import EchoedPrompt
from pagewick.server.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from pagewick.server.api.request_context import RequestContext
from pagewick.server.api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    SessionAnswer,
    SessionDeleted,
)
from pagewick.server.api.served_models import ServedModels, fingerprint_of
from pagewick.server.api.sse import EventStream, run_while_connected
from pagewick.server.api.template_arguments import template_arguments
from pagewick.server.api.thinking import Model, budget_of, ignored_names
from pagewick.server.api.usage import Figures
from pagewick.server.errors import ApiError
from pagewick.server.guard.body import read_body
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.request_log import Observation, RequestLog
from pagewick.text.output_stream import ChoiceDelta

_Body = TypeVar("_Body", ChatCompletionRequest, CompletionRequest)


class OpenAIApi:
    """The handlers, and what they share. admission: shared with TextApi; None: its own, for an engine without limit."""

    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, log: RequestLog, admission: Admission | None = None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._log = log
        self._admission = admission or Admission(engine)
        self._models = ServedModels(settings)
        self._conversations = Conversations(engine.session_ttl_s)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.get_model, methods=["GET"]),
            Route("/v1/sessions/{id:path}", self.get_session, methods=["GET"]),
            Route("/v1/sessions/{id:path}", self.delete_session, methods=["DELETE"]),
        ]

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body, ignored = await self._read(request, ChatCompletionRequest)
        ignored += ignored_names(body, self._model)
        context = RequestContext.of(request)
        with ExitStack() as held:
            recording = self._recording(context, body)
            if recording is not None:
                held.callback(recording.close)
            generation = await self._admission.run(request, partial(self._start_chat, context, body, recording))
            figures, form = Figures(body, [generation]), _chat_form(body)
            answer = self._new_answer("chatcmpl", body)
            if body.stream:
                chunks = chat_chunks(generation, form, figures, partial(ChatCompletionChunk, **answer))
                return self._stream(chunks, ignored, on_end=held.pop_all().close)
            choices = await run_while_connected(request, chat_choices(generation, form, figures))
        completion = ChatCompletion(**answer, choices=choices, **figures.of_answer())
        if generation.output.prompt_logprobs is not None:
            completion.prompt_logprobs = generation.output.prompt_logprobs
        if body.return_token_ids:
            completion.prompt_token_ids = generation.output.prompt_token_ids
        return json_answer(completion, ignored)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body, ignored = await self._read(request, CompletionRequest)
        context = RequestContext.of(request)
        generations, form = await self._admission.run(request, partial(self._start_completions, context, body))
        figures = Figures(body, generations)
        answer = self._new_answer("cmpl", body)
        if body.stream:
            return self._stream(completion_chunks(generations, form, figures, partial(Completion, **answer)), ignored)
        choices = await run_while_connected(request, completion_choices(generations, form, figures))
        return json_answer(Completion(**answer, choices=choices, **figures.of_answer()), ignored)

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models"""
        return json_answer(ModelList(self._models.cards(self._engine.info)))

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["id"]
        self._models.check(name)
        return json_answer(self._models.card(name, self._engine.info))

    async def get_session(self, request: Request) -> Response:
        """GET /v1/sessions/{id}: the messages that are recorded of it."""
        session_id = request.path_params["id"]
        messages = self._conversations.messages(RequestContext.of(request).key, session_id)
        if messages is None:
            raise _no_session(session_id)
        return json_answer(SessionAnswer(id=session_id, messages=messages))

    async def delete_session(self, request: Request) -> Response:
        """DELETE /v1/sessions/{id}"""
        session_id = request.path_params["id"]
        if not self._conversations.forget(RequestContext.of(request).key, session_id):
            raise _no_session(session_id)
        return json_answer(SessionDeleted(id=session_id))

    async def _read(self, request: Request, kind: type[_Body]) -> tuple[_Body, list[str]]:
        raw = await read_body(request, self._settings)
        body, ignored = decode_request(raw, kind, strict=self._settings.strict)
        self._models.check(body.model)
        self._admission.check_queue()
        return body, ignored

    async def _sampling_params(self, body: ChatCompletionRequest | CompletionRequest) -> SamplingParams:
        spelled = {text: await self._engine.encode(text, add_special_tokens=False) for text in body.bias_texts()}
        return body.sampling_params(self._engine.default_params, spelled)

    async def _start_chat(
        self, context: RequestContext, body: ChatCompletionRequest, recording: Recording | None
    ) -> Generation:
        params = await self._sampling_params(body)
        options = context.options(body, self._settings)
        budget = budget_of(body, self._settings, self._model)
        await self._engine.prepare(params, thinking_budget=budget)
        token_ids = await self._engine.encode_chat(
            body.plain_messages() if recording is None else recording.messages,
            add_special_tokens=bool(body.add_special_tokens),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            num_output_tokens=_room_for(params),
            **template_arguments(body, self._settings),
        )
        if params.prompt_logprobs is not None:
            check_prompt_logprobs("prompt_logprobs", 1, len(token_ids), params.prompt_logprobs)
        text = await asyncio.to_thread(self._engine.decode, token_ids) if self._settings.log_prompts else None
        seen = self._observe(context, "chat", body, token_ids, params, text)
        generation = self._engine.request(
            token_ids,
            params,
            request_id=context.engine_id(),
            options=options,
            on_delta=seen.on_delta if recording is None else _both(seen.on_delta, recording.observe),
            split_reasoning=self._settings.reasoning_parser == "auto" and body.reasoning_format != "none",
            thinking_budget=budget,
        )
        seen.attach(generation)
        return generation

    async def _start_completions(
        self, context: RequestContext, body: CompletionRequest
    ) -> tuple[list[Generation], CompletionForm]:
        prompts = body.prompts(self._engine.info.max_model_len)
        params = await self._sampling_params(body)
        await self._engine.prepare(params)
        options = context.options(body, self._settings)
        generations = []
        for place, prompt in enumerate(prompts):
            with _naming_prompt(place, len(prompts)):
                token_ids = await self._prompt_token_ids(prompt, body, params)
                text = prompt if isinstance(prompt, str) else None
                seen = self._observe(context, "completion", body, token_ids, params, text)
                generation = self._engine.request(
                    token_ids, params, request_id=context.engine_id(), options=options, on_delta=seen.on_delta
                )
            seen.attach(generation)
            generations.append(generation)
        num_tokens = sum(len(one.output.prompt_token_ids) for one in generations)
        if body.echo and params.logprobs is not None:
            check_prompt_logprobs("logprobs", params.n, num_tokens, params.logprobs)
        if body.prompt_logprobs is not None:
            check_prompt_logprobs("prompt_logprobs", params.n, num_tokens, body.prompt_logprobs)
        return generations, await asyncio.to_thread(self._completion_form, body, params, prompts, generations)

    def _observe(
        self,
        context: RequestContext,
        route: str,
        body: GenerationRequest,
        token_ids: list[int],
        params: SamplingParams,
        text: str | None,
    ) -> Observation:
        return self._log.begin(
            context.request_id,
            route,
            len(token_ids),
            bool(body.stream),
            params.n,
            max_tokens=params.max_tokens,
            prompt=text,
        )

    async def _prompt_token_ids(
        self, prompt: str | list[int], body: CompletionRequest, params: SamplingParams
    ) -> list[int]:
        if body.suffix:
            if not isinstance(prompt, str):
                raise InvalidRequestError("suffix needs a prompt that is a text", param="suffix")
            return await self._engine.encode_infill(prompt, body.suffix)
        num_kept = body.truncate_prompt_tokens
        if isinstance(prompt, str):
            return await self._engine.encode(
                prompt,
                add_special_tokens=body.add_special_tokens is not False,
                truncate_prompt_tokens=num_kept,
                num_output_tokens=_room_for(params),
            )
        if num_kept == -1:
            num_kept = max(1, self._engine.info.max_model_len - _room_for(params))
        return prompt if num_kept is None else prompt[-num_kept:]

    def _completion_form(
        self,
        body: CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[str | list[int]],
        generations: Sequence[Generation],
    ) -> CompletionForm:
        tokenizer = self._engine.tokenizer
        given = [prompt if isinstance(prompt, str) else None for prompt in prompts] if body.echo else []
        return CompletionForm(
            tokenizer=tokenizer,
            n=params.n,
            num_logprobs=params.logprobs,
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            wants_token_ids=bool(body.return_token_ids),
            echoes=[
                EchoedPrompt.of(tokenizer, generation.output.prompt_token_ids, text)
                for text, generation in zip(given, generations, strict=False)
            ],
        )

    def _recording(self, context: RequestContext, body: ChatCompletionRequest) -> Recording | None:
        """Where the server records by its own choice, requests without a session are served as ever."""
        is_wanted = body.record_conversation
        if is_wanted is None:
            is_wanted = self._settings.record_conversation and body.session_id is not None
        if not is_wanted:
            return None
        if not body.session_id:
            message = "record_conversation needs a session_id, which names the conversation"
            raise InvalidRequestError(message, param="session_id")
        if (body.n or 1) > 1:
            raise InvalidRequestError("a conversation that is recorded has one answer; leave out n", param="n")
        return self._conversations.begin(
            context.key,
            body.session_id,
            body.plain_messages(),
            is_continuation=bool(body.continue_final_message),
        )

    @property
    def _model(self) -> Model:
        return Model(self._engine.reasoning_tags is not None, self._engine.can_think_by_switch)

    def _new_answer(self, kind: str, body: GenerationRequest) -> dict[str, Any]:
        """What an answer begins with, and all its chunks have in common."""
        return {
            "id": f"{kind}-{body.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._settings.model_name,
            "system_fingerprint": fingerprint_of(self._engine.info),
        }

    def _stream(
        self, chunks: AsyncGenerator[Any], ignored: Sequence[str], on_end: Callable[[], None] | None = None
    ) -> EventStream:
        return EventStream(
            chunks,
            headers=headers_naming(ignored),
            keep_alive_s=self._settings.sse_keep_alive_interval,
            on_end=on_end,
        )


def _chat_form(body: ChatCompletionRequest) -> ChatForm:
    """With echo the answer begins with the last message, if that is the model's too."""
    last = body.messages[-1]
    return ChatForm(
        wants_logprobs=body.wants_logprobs,
        wants_reasoning=body.include_reasoning is not False,
        wants_token_ids=bool(body.return_token_ids),
        echo=last.text if body.echo and last.role == "assistant" else "",
    )


@contextmanager
def _naming_prompt(place: int, num_prompts: int) -> Iterator[None]:
    """Say of what is wrong with one of several prompts which one it is."""
    try:
        yield
    except InvalidRequestError as error:
        if num_prompts == 1 or not (isinstance(error, ContextLengthError) or error.param == "prompt"):
            raise
        kind = ContextLengthError if isinstance(error, ContextLengthError) else InvalidRequestError
        name = f"prompt[{place}]"
        raise kind(f"{name}: {error}", param=name) from None


def _room_for(params: SamplingParams) -> int:
    """Tokens that are kept free behind a prompt that is cut to fit."""
    return 1 if params.max_tokens is None else params.max_tokens


def _both(first: OnDelta, second: OnDelta) -> OnDelta:
    def observe(delta: ChoiceDelta) -> None:
        first(delta)
        second(delta)

    return observe


def _no_session(session_id: str) -> ApiError:
    message = f"no messages are recorded of a session {session_id[:200]!r}"
    return ApiError(404, message, param="session_id", code="session_not_found")
