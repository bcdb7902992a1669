"""Ollama's API: its routes for one model. Those of a server with several models are in server/router/ollama.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pagewick.server.api.dialect import Dialect
from pagewick.server.api.framing import LineFraming
from pagewick.server.api.json_response import headers_naming, json_response
from pagewick.server.api.ollama.catalog import ModelFiles, described, listed, running
from pagewick.server.api.ollama.fields import (
    OLLAMA_FIELDS,
    GeneratingFields,
    ModelRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    UnloadRequest,
)
from pagewick.server.api.ollama.rendering import Form, OllamaResponse, OllamaVectors, Piece, since
from pagewick.server.api.ollama.responses import (
    ModelDescription,
    ModelTags,
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaText,
    OllamaVersion,
    PullStatus,
    RunningModels,
)
from pagewick.server.api.operation import Operation, describes
from pagewick.server.core.request_context import RequestContext
from pagewick.server.errors import ApiError

# The version of Ollama whose API this is: its clients ask for it, and refuse older ones.
API_VERSION = "0.12.11"


def _error_of(error: ApiError) -> OllamaError:
    return OllamaError(error.message)


OLLAMA_LINES = LineFraming(error_body=_error_of)

OLLAMA = Operation(tag="Ollama's API", streams=OLLAMA_LINES.media_type, known=OLLAMA_FIELDS, error=OllamaError)
_GENERATING = replace(OLLAMA, errors=(404, 429, 500, 504))
_ABOUT_MODELS = replace(OLLAMA, errors=(404,))


class OllamaApi(Dialect):
    """The handlers."""

    framing = OLLAMA_LINES
    known_fields = OLLAMA_FIELDS
    paths = ("/api",)
    streams_by_default = True

    def routes(self) -> list[Route]:
        return [
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.embeddings, methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.ps, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/version", version, methods=["GET"]),
        ]

    @classmethod
    def unloading(cls, path: str, body: bytes) -> Response | None:
        try:
            wanted = msgspec.json.decode(body, type=UnloadRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # the handlers say what is wrong
        if not wanted.only_unloads:
            return None
        form = Form(wanted.model or "", is_chat=path == "/api/chat")
        return json_response(form.object(Piece(), done_reason="unload"))

    @describes(replace(_GENERATING, request=OllamaChatRequest, response=OllamaChat, chunk=OllamaChat))
    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        body, ignored = await self.read(request, OllamaChatRequest)
        form = self._form(body, is_chat=True)
        ignored += self._without_effect(body)
        if body.only_loads:
            return _loaded(form, ignored)
        chat = body.chat_request(reads_images=self.reads_images)
        return await self.answer_chat(request, chat, lambda generation: OllamaResponse(generation, form), ignored)

    @describes(replace(_GENERATING, request=OllamaGenerateRequest, response=OllamaText, chunk=OllamaText))
    async def generate(self, request: Request) -> Response:
        """Answer a prompt, or continue it."""
        body, ignored = await self.read(request, OllamaGenerateRequest)
        form = self._form(body, is_chat=False)
        has_template = self.core.engine.has_chat_template and not body.is_plain
        ignored += dict.fromkeys([*self._without_effect(body), *([] if has_template else body.unused_names())])
        if body.only_loads:
            return _loaded(form, ignored)
        if has_template:
            chat = body.chat_request(reads_images=self.reads_images)
            return await self.answer_chat(request, chat, lambda generation: OllamaResponse(generation, form), ignored)
        wanted = body.prompts_request()
        start = partial(self.core.start_prompts, RequestContext.of(request), wanted)
        (generation,) = await self.admission.run(request, start)
        response = OllamaResponse(generation, form)
        return self.stream(response, ignored) if wanted.is_stream else await self.whole(request, response, ignored)

    @describes(replace(_GENERATING, request=OllamaEmbedRequest, response=OllamaEmbeddings))
    async def embed(self, request: Request) -> Response:
        """Return a vector of length 1 for each of some texts."""
        body, ignored = await self.read(request, OllamaEmbedRequest)
        return await self._embed(request, body, ignored)

    @describes(replace(_GENERATING, request=OllamaEmbeddingsRequest, response=OllamaEmbedding))
    async def embeddings(self, request: Request) -> Response:
        """Return a vector for a text, of any length; the former route."""
        body, ignored = await self.read(request, OllamaEmbeddingsRequest)
        return await self._embed(request, body, ignored)

    @describes(replace(OLLAMA, response=ModelTags))
    async def tags(self, request: Request) -> Response:
        """List the model under each of its names."""
        files, info = await self._files(), self.core.engine.info
        return json_response(ModelTags([listed(card.id, files, info) for card in self.models.cards(info)]))

    @describes(replace(OLLAMA, response=RunningModels))
    async def ps(self, request: Request) -> Response:
        """List the model, which is loaded."""
        files, info = await self._files(), self.core.engine.info
        return json_response(RunningModels([running(self.shown_model(None), files, info)]))

    @describes(replace(_ABOUT_MODELS, request=ModelRequest, response=ModelDescription))
    async def show(self, request: Request) -> Response:
        """Describe the model."""
        _, ignored = await self._read_name(request)
        return json_response(described(await self._files(), self.core.engine), ignored)

    @describes(replace(_ABOUT_MODELS, request=ModelRequest, response=PullStatus, chunk=PullStatus))
    async def pull(self, request: Request) -> Response:
        """Succeed if the model is served; this server downloads nothing by request."""
        body, ignored = await self._read_name(request)
        return pulled(body, ignored)

    async def _embed(
        self, request: Request, body: OllamaEmbedRequest | OllamaEmbeddingsRequest, ignored: list[str]
    ) -> Response:
        ignored += body.ignored_options(self.core.engine.info.max_model_len)
        began = time.monotonic()
        start = partial(self.core.start_prompts, RequestContext.of(request), body.prompts_request())
        response = OllamaVectors(
            await self.admission.run(request, start),
            body.params(),
            self._name(body.model),
            self.admission.num_at_once,
            isinstance(body, OllamaEmbeddingsRequest),
            began,
        )
        return await self.whole(request, response, ignored)

    async def _read_name(self, request: Request) -> tuple[ModelRequest, list[str]]:
        body, ignored = await self.read(request, ModelRequest, needs_engine=False)
        self.models.check(body.model or body.name, self.core.engine.info)
        return body, ignored

    async def _files(self) -> ModelFiles:
        return await asyncio.to_thread(ModelFiles.of, Path(self.core.engine.info.model_path))

    def _form(self, body: GeneratingFields, *, is_chat: bool) -> Form:
        return Form(self._name(body.model), is_chat, bool(body.logprobs))

    def _name(self, given: str | None) -> str:
        """Return the model's name in a response: clients of this API expect the one that they have sent."""
        return self.shown_model(None) if given is None else given

    def _without_effect(self, body: GeneratingFields) -> list[str]:
        return body.ignored_names(self.core.thinking_model, self.core.engine.info.max_model_len)


@describes(replace(OLLAMA, response=OllamaVersion))
async def version(request: Request) -> Response:
    """Return the version of Ollama whose API this is."""
    return json_response(OllamaVersion(API_VERSION))


def pulled(body: ModelRequest, ignored: Sequence[str] = ()) -> Response:
    """Return what Ollama says after a download."""
    statuses = [PullStatus("pulling manifest"), PullStatus("success")]
    if body.stream is False:
        return json_response(statuses[-1], ignored)
    return _lines(statuses, ignored)


def _loaded(form: Form, ignored: Sequence[str]) -> Response:
    """Return the response to a request that only wants the model to be loaded, which it is. One object, in any case."""
    ending = {"done_reason": "load", "total_duration": since(form.began), "load_duration": 0}
    return json_response(form.object(Piece(), **ending), ignored)


def _lines(objects: Sequence[Any], ignored: Sequence[str]) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        for one in objects:
            yield OLLAMA_LINES.frame(one)

    return StreamingResponse(lines(), media_type=OLLAMA_LINES.media_type, headers=headers_naming(ignored))
