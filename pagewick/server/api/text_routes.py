"""Routes for texts and tokens that need no engine: tokenize, detokenize and apply a chat template.

Requests and responses have the forms of vLLM and llama.cpp.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick import __version__
from pagewick.async_llm import AsyncEngine
from pagewick.errors import InvalidRequestError
from pagewick.server.api.admission import Admission
from pagewick.server.api.conversation_fields import ReasoningEffort, ThinkingOption, template_of, thinking_of
from pagewick.server.api.decoding import decode_request
from pagewick.server.api.images import check_parts
from pagewick.server.api.json_response import json_response
from pagewick.server.api.known_fields import PROMPT_FIELDS
from pagewick.server.api.messages import ChatMessage, plain_messages
from pagewick.server.api.operation import Operation, describes
from pagewick.server.api.request_fields import one_of
from pagewick.server.api.responses import (
    DetokenizeResponse,
    PromptResponse,
    TokenizeResponse,
    TokenPiece,
    VersionResponse,
)
from pagewick.server.api.served_models import ServedModels
from pagewick.server.api.tool_fields import Tool, tools_of
from pagewick.server.core.limits import MAX_CONTEXTS, MAX_MESSAGES, check_count
from pagewick.server.core.template import chat_options
from pagewick.server.guard.body import read_body
from pagewick.server.settings import ServerSettings
from pagewick.text.tool_calls.checks import checked_offer


class _Conversation(Struct, kw_only=True):
    """A conversation and the fields that make it a prompt, as in ChatCompletionRequest.

    model: a name of the model. messages: the conversation. tools: the tools that the model may call.
    """

    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingOption | None = None
    reasoning_effort: ReasoningEffort | None = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """Raises InvalidRequestError if there are none, or too many."""
        if self.messages is None:
            raise InvalidRequestError("messages is missing", param="messages")
        check_count("messages", len(self.messages), MAX_MESSAGES)
        return plain_messages(self.messages)

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as a chat gives them to the template. Raises InvalidRequestError for wrong ones."""
        tools = tools_of(self.tools, None)
        checked_offer(tools)
        return tools or None


class ApplyTemplateRequest(_Conversation, kw_only=True):
    """messages are required."""


class TokenizeRequest(_Conversation, kw_only=True):
    """Has prompt or messages, which are vLLM's, or content, which is llama.cpp's.

    prompt, content: the text. parse_special: llama.cpp's; special tokens in a text are always recognised.
    add_special_tokens: true by default for a prompt, since only a template brings its own.
    add_special: llama.cpp's name for it; its content gets special tokens only on request.
    return_token_strs: also return the text of each token. with_pieces: likewise, in llama.cpp's form.
    """

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "messages", "content") if getattr(self, name) is not None]
        if len(given) != 1:
            message = "give one of prompt, messages and content" + (f", not {' and '.join(given)}" if given else "")
            raise InvalidRequestError(message, param=given[-1] if given else "prompt")
        if self.parse_special is False:
            message = "special tokens written in a text are always recognised; leave out parse_special"
            raise InvalidRequestError(message, param="parse_special")

    @property
    def adds_special_tokens(self) -> bool:
        wanted = one_of(add_special_tokens=self.add_special_tokens, add_special=self.add_special)
        return self.prompt is not None if wanted is None else bool(wanted)


class DetokenizeRequest(Struct, kw_only=True):
    """tokens: token ids. model: a name of the model."""

    tokens: list[int]
    model: str | None = None


_OF_TEXTS = Operation(tag="Texts and tokens", known=PROMPT_FIELDS, errors=(404, 429))

_Body = TypeVar("_Body", TokenizeRequest, DetokenizeRequest, ApplyTemplateRequest)


class TextApi:
    """The handlers."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, admission: Admission | None = None) -> None:
        self._engine = engine
        self._settings = settings
        self._models = ServedModels(settings)
        self._admission = admission or Admission(engine)

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    @describes(replace(_OF_TEXTS, request=TokenizeRequest, response=TokenizeResponse))
    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or a conversation."""
        body, ignored = await self._read(request, TokenizeRequest)
        ignored += check_parts(body.messages or (), reads_images=self._reads_images)
        token_ids = await self._admission.run(request, partial(self._encode, body))
        return json_response(await asyncio.to_thread(self._tokenize_response, body, token_ids), ignored)

    @describes(replace(_OF_TEXTS, request=DetokenizeRequest, response=DetokenizeResponse))
    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        body, ignored = await self._read(request, DetokenizeRequest)
        limit = MAX_CONTEXTS * self._engine.info.max_model_len
        if len(body.tokens) > limit:
            most = f"{limit} ids, {MAX_CONTEXTS} times the model's context"
            message = f"tokens must have at most {most}; got {len(body.tokens)}"
            raise InvalidRequestError(message, param="tokens")
        text = await self._admission.run(request, partial(asyncio.to_thread, self._engine.decode, body.tokens))
        return json_response(DetokenizeResponse(text, text), ignored)

    @describes(replace(_OF_TEXTS, request=ApplyTemplateRequest, response=PromptResponse))
    async def apply_template(self, request: Request) -> Response:
        """Return the prompt that the model reads for a conversation."""
        body, ignored = await self._read(request, ApplyTemplateRequest)
        ignored += check_parts(body.messages or (), reads_images=self._reads_images)
        arguments = chat_options(template_of(body), thinking_of(body), self._settings)
        render = partial(self._engine.render_chat, body.plain_messages(), body.plain_tools(), **arguments)
        prompt = await self._admission.run(request, render)
        return json_response(PromptResponse(prompt), ignored)

    @describes(Operation(tag="Server", response=VersionResponse))
    async def version(self, request: Request) -> Response:
        """Return the version of Pagewick."""
        return json_response(VersionResponse(__version__))

    @property
    def _reads_images(self) -> bool:
        return self._engine.info.image_token_id is not None

    async def _read(self, request: Request, kind: type[_Body]) -> tuple[_Body, list[str]]:
        raw = await read_body(request, self._settings, reads_images=self._reads_images)
        body, ignored = decode_request(raw, kind, strict=self._settings.strict, known=PROMPT_FIELDS)
        self._models.check(body.model, self._engine.info)
        return body, ignored

    async def _encode(self, body: TokenizeRequest) -> list[int]:
        text = body.content if body.prompt is None else body.prompt
        if text is not None:
            return await self._engine.encode(text, add_special_tokens=body.adds_special_tokens)
        arguments = chat_options(template_of(body), thinking_of(body), self._settings)
        return await self._engine.encode_chat(
            body.plain_messages(), body.plain_tools(), add_special_tokens=body.adds_special_tokens, **arguments
        )

    def _tokenize_response(self, body: TokenizeRequest, token_ids: list[int]) -> TokenizeResponse:
        max_model_len = self._engine.info.max_model_len
        response = TokenizeResponse(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids)
        if body.return_token_strs:
            response.token_strs = self._engine.token_strings(token_ids)
        if body.with_pieces:
            response.tokens = [TokenPiece(token_id, self._piece(token_id)) for token_id in token_ids]
        return response

    def _piece(self, token_id: int) -> str | list[int]:
        raw = self._engine.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)
