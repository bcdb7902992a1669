"""The OpenAI API: chat completions, completions, embeddings, models; classes, scores; and recorded conversations."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from functools import partial
from operator import attrgetter
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.errors import InvalidRequestError
from pagewick.generation import Generation
from pagewick.server.api.chat_response import ChatForm, ChatResponse
from pagewick.server.api.chat_rounds import RoundsResponse
from pagewick.server.api.classification import (
    ClassificationList,
    ClassificationRequest,
    ClassificationResponse,
)
from pagewick.server.api.completion_response import CompletionForm, CompletionResponse
from pagewick.server.api.conversation_fields import ignored_names, unread_variables
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.embeddings import EmbeddingList, EmbeddingRequest, EmbeddingResponse
from pagewick.server.api.framing import EventFraming
from pagewick.server.api.images import check_parts
from pagewick.server.api.json_response import json_response
from pagewick.server.api.known_fields import OPENAI_FIELDS
from pagewick.server.api.logprobs import EchoedPrompt
from pagewick.server.api.operation import Operation, describes
from pagewick.server.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from pagewick.server.api.reranking import (
    PairFields,
    PairsResponse,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from pagewick.server.api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelCard,
    ModelList,
    SessionDeleted,
    SessionResponse,
)
from pagewick.server.api.served_models import fingerprint_of
from pagewick.server.api.server_tools import with_server_tools
from pagewick.server.api.usage import UsageReport
from pagewick.server.core.request import PromptsRequest
from pagewick.server.core.request_context import RequestContext
from pagewick.server.core.tool_rounds import ToolRounds
from pagewick.server.errors import ApiError

_GENERATING = Operation(tag="OpenAI's API", known=OPENAI_FIELDS, errors=(404, 409, 429, 500, 504))
_CLASSIFYING = replace(_GENERATING, tag="Classification")
_SCORING = replace(_GENERATING, tag="Reranking")
_MODELS = Operation(tag="OpenAI's API")
_SESSIONS = Operation(tag="Recorded conversations", errors=(404,))

# Jina's and Cohere's, and those of vLLM and llama.cpp.
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
SCORE_PATHS = ("/v1/score", "/score")
CLASSIFY_PATHS = ("/v1/classify", "/classify")

OPENAI_EVENTS = EventFraming(error_body=attrgetter("body"), end=b"data: [DONE]\n\n")


class OpenAIApi(Dialect):
    """The handlers."""

    framing = OPENAI_EVENTS
    known_fields = OPENAI_FIELDS

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, self.classify, methods=["POST"]) for path in CLASSIFY_PATHS),
            *(Route(path, self.rerank, methods=["POST"]) for path in RERANK_PATHS),
            *(Route(path, self.score, methods=["POST"]) for path in SCORE_PATHS),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.get_model, methods=["GET"]),
            Route("/v1/sessions/{id:path}", self.get_session, methods=["GET"]),
            Route("/v1/sessions/{id:path}", self.delete_session, methods=["DELETE"]),
        ]

    @describes(replace(_GENERATING, request=ChatCompletionRequest, response=ChatCompletion, chunk=ChatCompletionChunk))
    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        body, ignored = await self.read(request, ChatCompletionRequest)
        ignored += check_parts(body.messages, reads_images=self.reads_images)
        ignored += ignored_names(body, self.core.thinking_model)
        wanted, names = with_server_tools(body.chat_request(), body.server_tools, self.core.tools)
        ignored += unread_variables(wanted.template, self.core.engine)

        def render(generation: Generation) -> ChatResponse | RoundsResponse:
            head, form = self._head("chatcmpl", body), _chat_form(body)
            if self.core.tools is None or not names:
                return ChatResponse(generation, form, UsageReport(body, [generation]), head)
            context = RequestContext.of(request)
            start = partial(self.core.start_chat, context, recording=None)
            rounds = ToolRounds(self.core.tools, wanted, generation, start, names, context.request_id)
            report = UsageReport(body, rounds.generations, are_rounds=True)
            return RoundsResponse(
                rounds, ChatResponse(generation, dataclasses.replace(form, has_tools=True), report, head)
            )

        return await self.answer_chat(request, wanted, render, ignored)

    @describes(replace(_GENERATING, request=CompletionRequest, response=Completion, chunk=Completion))
    async def completions(self, request: Request) -> Response:
        """Continue texts or tokens."""
        body, ignored = await self.read(request, CompletionRequest)
        wanted = body.prompts_request(self.core.engine.info.max_model_len)
        start = partial(self._start_completions, RequestContext.of(request), body, wanted)
        response = await self.admission.run(request, start)
        return self.stream(response, ignored) if wanted.is_stream else await self.whole(request, response, ignored)

    @describes(replace(_GENERATING, request=EmbeddingRequest, response=EmbeddingList))
    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each of some texts, or of some lists of tokens."""
        body, ignored = await self.read(request, EmbeddingRequest)
        start = partial(self._start_embeddings, RequestContext.of(request), body)
        return await self.whole(request, await self.admission.run(request, start), ignored)

    @describes(replace(_CLASSIFYING, request=ClassificationRequest, response=ClassificationList))
    async def classify(self, request: Request) -> Response:
        """Sort texts, or lists of tokens, by the model's labels."""
        body, ignored = await self.read(request, ClassificationRequest)
        start = partial(self._start_classes, RequestContext.of(request), body)
        return await self.whole(request, await self.admission.run(request, start), ignored)

    @describes(replace(_SCORING, request=RerankRequest, response=RerankList))
    async def rerank(self, request: Request) -> Response:
        """Order documents by how well they match a query."""
        body, ignored = await self.read(request, RerankRequest)
        start = partial(self._start_pairs, RequestContext.of(request), body, "documents")
        return await self.whole(request, await self.admission.run(request, start), ignored)

    @describes(replace(_SCORING, request=ScoreRequest, response=ScoreList))
    async def score(self, request: Request) -> Response:
        """Return how well texts match each other."""
        body, ignored = await self.read(request, ScoreRequest)
        start = partial(self._start_pairs, RequestContext.of(request), body, body.names[1])
        return await self.whole(request, await self.admission.run(request, start), ignored)

    @describes(replace(_MODELS, response=ModelList))
    async def list_models(self, request: Request) -> Response:
        """List the model under each of its names."""
        return json_response(ModelList(self.models.cards(self.core.engine.info)))

    @describes(replace(_MODELS, response=ModelCard, errors=(404,)))
    async def get_model(self, request: Request) -> Response:
        """Describe the model. A path that ends with the slash lists the models."""
        name = request.path_params["id"]
        if not name:
            return await self.list_models(request)
        self.models.check(name, self.core.engine.info)
        return json_response(self.models.card(name, self.core.engine.info))

    @describes(replace(_SESSIONS, response=SessionResponse))
    async def get_session(self, request: Request) -> Response:
        """Return the recorded messages of a session."""
        session_id = request.path_params["id"]
        messages = await self.core.conversations.messages(RequestContext.of(request).key, session_id)
        if messages is None:
            raise _no_session(session_id)
        return json_response(SessionResponse(id=session_id, messages=messages))

    @describes(replace(_SESSIONS, response=SessionDeleted))
    async def delete_session(self, request: Request) -> Response:
        """Forget the recorded messages of a session."""
        session_id = request.path_params["id"]
        if not await self.core.conversations.forget(RequestContext.of(request).key, session_id):
            raise _no_session(session_id)
        return json_response(SessionDeleted(id=session_id))

    async def _start_completions(
        self, context: RequestContext, body: CompletionRequest, wanted: PromptsRequest
    ) -> CompletionResponse:
        generations = await self.core.start_prompts(context, wanted)
        form = await asyncio.to_thread(self._completion_form, body, wanted, generations)
        return CompletionResponse(generations, form, UsageReport(body, generations), self._head("cmpl", body))

    async def _start_embeddings(self, context: RequestContext, body: EmbeddingRequest) -> EmbeddingResponse:
        generations = await self.core.start_prompts(context, body.prompts_request(body.params()))
        return EmbeddingResponse(generations, body, self.shown_model(body.model), self.admission.num_at_once)

    async def _start_classes(self, context: RequestContext, body: ClassificationRequest) -> ClassificationResponse:
        how = self.core.engine.classification(body.wants_probabilities)
        generations = await self.core.start_prompts(context, body.prompts_request(how))
        return ClassificationResponse(generations, how, self.shown_model(body.model), self.admission.num_at_once)

    async def _start_pairs(self, context: RequestContext, body: PairFields, documents: str) -> PairsResponse:
        scoring = self.core.engine.scoring()
        try:
            generations = await self.core.start_prompts(context, body.prompts_request(scoring, documents))
        except InvalidRequestError as error:
            # Messages about the prompt of a pair are right; the client has sent its document.
            error.param = documents if error.param == "prompt" else error.param
            raise
        return PairsResponse(generations, body, scoring, self.shown_model(body.model), self.admission.num_at_once)

    def _completion_form(
        self, body: CompletionRequest, wanted: PromptsRequest, generations: list[Generation]
    ) -> CompletionForm:
        tokenizer = self.core.engine.tokenizer
        given = [prompt if isinstance(prompt, str) else None for prompt in wanted.prompts] if body.echo else []
        return CompletionForm(
            tokenizer=tokenizer,
            n=len(generations[0].output.outputs),
            num_logprobs=body.num_logprobs,
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            wants_token_ids=bool(body.return_token_ids),
            echoes=[
                EchoedPrompt.of(tokenizer, generation.output.prompt_token_ids, text)
                for text, generation in zip(given, generations, strict=False)
            ],
        )

    def _head(self, kind: str, body: GenerationRequest) -> dict[str, Any]:
        """Return the fields that a response begins with, and that all its chunks have in common."""
        return {
            "id": f"{kind}-{body.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.shown_model(body.model),
            "system_fingerprint": fingerprint_of(self.core.engine.info),
        }


def _chat_form(body: ChatCompletionRequest) -> ChatForm:
    """With echo the response begins with the last message, if that is the assistant's too."""
    last = body.messages[-1]
    return ChatForm(
        wants_logprobs=body.wants_logprobs,
        wants_reasoning=body.include_reasoning is not False,
        wants_token_ids=bool(body.return_token_ids),
        echo=last.text if body.echo and last.role == "assistant" else "",
        is_legacy=body.is_legacy,
        has_tools=bool(body.tools or body.functions),
    )


def _no_session(session_id: str) -> ApiError:
    message = f"there are no recorded messages of a session {session_id[:200]!r}"
    return ApiError(404, message, param="session_id", code="session_not_found")
