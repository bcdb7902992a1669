"""The Messages API of Anthropic: messages, and the number of their tokens."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.generation import Generation
from pagewick.server.api.anthropic.blocks import Conversation
from pagewick.server.api.anthropic.fields import ANTHROPIC_FIELDS, CountTokensRequest, MessagesRequest
from pagewick.server.api.anthropic.rendering import MessageResponse, named
from pagewick.server.api.anthropic.responses import (
    EVENTS,
    ErrorDetails,
    Message,
    MessagesError,
    MessagesErrorDetail,
    Ping,
    TokenCount,
)
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.framing import EventFraming
from pagewick.server.api.json_response import json_response
from pagewick.server.api.operation import Operation, describes
from pagewick.server.core.request import ChatRequest
from pagewick.server.errors import ApiError

# Anthropic's clients wait and ask again after a 529, as they do after a 429.
_STATUSES = {503: 529}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Claude Code summarizes a conversation that has become too long when it reads these words.
_TOO_LONG = "prompt is too long: "
# The tool runner of Anthropic's client asks the server to keep the conversation, and sends it whole after this error.
_NO_THREADS = ErrorDetails("thread_unsupported_request")

_MESSAGES = Operation(tag="Anthropic's API", known=ANTHROPIC_FIELDS, error=MessagesError)


def _error_of(error: ApiError) -> MessagesError:
    status = _STATUSES.get(error.status, error.status)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail = MessagesErrorDetail(kind, error.message)
    if error.code == "context_length_exceeded":
        detail.message = f"{_TOO_LONG}{error.message}"
    if error.param == "thread":
        detail.details = _NO_THREADS
    return MessagesError(detail)


_UNNAMED = EventFraming(error_body=_error_of, error_name="error")
ANTHROPIC_EVENTS = EventFraming(error_body=_error_of, error_name="error", ping=_UNNAMED.frame(named(Ping())))


class AnthropicApi(Dialect):
    """The handlers."""

    framing = ANTHROPIC_EVENTS
    known_fields = ANTHROPIC_FIELDS
    paths = ("/v1/messages",)
    id_header = "request-id"

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    @classmethod
    def error_answer(cls, error: ApiError, request_id: str) -> tuple[int, Any]:
        body = replace(_error_of(error), request_id=request_id)
        return _STATUSES.get(error.status, error.status), to_builtins(body)

    @describes(
        replace(
            _MESSAGES, request=MessagesRequest, response=Message, chunk=EVENTS, errors=(404, 409, 429, 500, 504, 529)
        )
    )
    async def create(self, request: Request) -> Response:
        """Answer a conversation with a message."""
        body, ignored = await self.read(request, MessagesRequest)
        chat = await self._chat(body, ignored)

        def render(generation: Generation) -> MessageResponse:
            message_id = f"msg_{uuid.uuid4().hex}"
            return MessageResponse(
                generation, message_id, self.shown_model(body.model), body.max_tokens, body.shows_thoughts
            )

        return await self.answer_chat(request, chat, render, ignored)

    @describes(replace(_MESSAGES, request=CountTokensRequest, response=TokenCount, errors=(404, 429, 529)))
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        body, ignored = await self.read(request, CountTokensRequest, needs_engine=False)
        chat = await self._chat(body, ignored)
        count = await self.admission.run(request, partial(self.core.count_tokens, chat))
        return json_response(TokenCount(count), ignored)

    async def _chat(self, body: CountTokensRequest, ignored: list[str]) -> ChatRequest:
        """Make the core's request, and add the names of fields that this model has no use for to `ignored`."""
        takes_late = True
        if any(message.role == "system" for message in body.messages):
            takes_late = await self.core.takes_late_instructions()
        conversation = Conversation(
            body.system, body.messages, takes_late_instructions=takes_late, reads_images=self.reads_images
        )
        ignored += dict.fromkeys([*conversation.ignored, *body.ignored_names(self.core.thinking_model)])
        return body.chat_request(conversation)
