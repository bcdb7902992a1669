"""ResponsesApi: the routes of the Responses API."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.generation import Generation
from pagewick.server.api.conversation_fields import unread_variables
from pagewick.server.api.dialect import Dialect, GeneratedResponse
from pagewick.server.api.framing import Framing
from pagewick.server.api.json_response import json_response
from pagewick.server.api.operation import Operation, describes
from pagewick.server.api.responses_api.answer import (
    EVENTS,
    AnswerFraming,
    Keep,
    ResponsesAnswer,
    Stored,
    item_ids,
    stored_of,
)
from pagewick.server.api.responses_api.input_items import Item, checked_items, conversation_of, ignored_in
from pagewick.server.api.responses_api.items import OutputItems, new_id
from pagewick.server.api.responses_api.objects import (
    InputTokens,
    ItemList,
    ResponseDeleted,
    ResponseEvent,
    ResponseObject,
)
from pagewick.server.api.responses_api.request import (
    ENCRYPTED_CONTENT,
    RESPONSES_FIELDS,
    InputTokensRequest,
    PromptFields,
    ResponsesRequest,
)
from pagewick.server.core.request import ChatRequest
from pagewick.server.core.request_context import RequestContext
from pagewick.server.errors import ApiError

_TAG = "OpenAI's Responses API"
_STORED = Operation(tag=_TAG, errors=(404,))
_GONE = "it was not stored, has been deleted, or had to make room for later responses"
MAX_PAGE = 100
_DEFAULT_PAGE = 20


class ResponsesApi(Dialect):
    """The handlers."""

    framing = EVENTS
    known_fields = RESPONSES_FIELDS

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input_tokens, methods=["POST"]),
            Route("/v1/responses/{id}", self.get, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.list_input_items, methods=["GET"]),
        ]

    def framing_of(self, response: GeneratedResponse) -> Framing:
        return AnswerFraming(response) if isinstance(response, ResponsesAnswer) else self.framing

    @describes(
        Operation(
            tag=_TAG,
            request=ResponsesRequest,
            response=ResponseObject,
            chunk=ResponseEvent,
            known=RESPONSES_FIELDS,
            errors=(404, 429, 500, 504),
        )
    )
    async def create(self, request: Request) -> Response:
        """Answer a conversation with items, and keep the response."""
        body, ignored = await self.read(request, ResponsesRequest)
        owner = RequestContext.of(request).key
        chat, items = await self._chat_of(owner, body)
        head = self._head(body)
        keep = partial(self._keep, owner, items) if body.is_stored else None
        return await self.answer_chat(
            request, chat, partial(_answer, body, head, keep), ignored + self._without_effect(body, chat)
        )

    @describes(
        Operation(
            tag=_TAG,
            request=InputTokensRequest,
            response=InputTokens,
            known=RESPONSES_FIELDS,
            errors=(404, 429),
        )
    )
    async def count_input_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt without generating anything."""
        body, ignored = await self.read(request, InputTokensRequest)
        chat, _ = await self._chat_of(RequestContext.of(request).key, body)
        count = await self.admission.run(request, partial(self.core.count_tokens, chat))
        return json_response(InputTokens(input_tokens=count), ignored + self._without_effect(body, chat))

    @describes(replace(_STORED, response=ResponseObject))
    async def get(self, request: Request) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            message = "a stored response cannot be streamed again; leave out stream"
            raise UnsupportedError(message, param="stream")
        return json_response((await self._stored(request)).response, _further_parameters(request, "stream"))

    @describes(replace(_STORED, response=ResponseDeleted))
    async def delete(self, request: Request) -> Response:
        """Forget a stored response."""
        response_id = request.path_params["id"]
        if not await self.core.responses.forget(RequestContext.of(request).key, response_id):
            raise _no_response(response_id)
        return json_response(ResponseDeleted(id=response_id))

    @describes(replace(_STORED, response=ItemList, errors=(400, 404)))
    async def list_input_items(self, request: Request) -> Response:
        """List the items before a stored response, the latest first."""
        items = (await self._stored(request)).input
        page = _page_of(items, request.query_params)
        return json_response(page, _further_parameters(request, "limit", "order", "after"))

    async def _chat_of(self, owner: str, body: PromptFields) -> tuple[ChatRequest, list[Item]]:
        """Return the core's request, and all items of its conversation. Raises ApiError, InvalidRequestError."""
        before: list[Item] = []
        if body.previous_response_id is not None:
            found = await self.core.responses.find(owner, body.previous_response_id)
            if found is None:
                raise _no_response(body.previous_response_id, is_previous=True)
            previous = stored_of(found)
            before = previous.input + previous.output
        checked = checked_items(body.input, reads_images=self.reads_images)
        new = [await self._resolved(owner, item, f"input[{place}]") for place, item in enumerate(checked)]
        return body.chat_request(conversation_of(body.instructions, before, new)), before + new

    async def _resolved(self, owner: str, item: Item, where: str) -> Item:
        """Return the item to which a reference refers, and any other item unchanged. Raises ApiError (404)."""
        if item["type"] != "item_reference":
            return item
        found = await self.core.responses.find_by_item(owner, item["id"])
        stored = None if found is None else stored_of(found)
        items = [] if stored is None else stored.output + stored.input
        for one in items:
            if one.get("id") == item["id"]:
                return one
        message = f"{where}: there is no stored item {item['id'][:80]!r}: its response is gone; send the item itself"
        raise ApiError(404, message, param=f"{where}.id", code="item_not_found")

    async def _keep(self, owner: str, items: list[Item], response: ResponseObject) -> None:
        """Keep a response with its whole conversation, so that it does not depend on any other one."""
        stored = Stored.of(response, items)
        names = [item["id"] for item in items] + item_ids(response.output)
        await self.core.responses.keep(owner, response.id, stored.encoded(), names)

    async def _stored(self, request: Request) -> Stored:
        response_id = request.path_params["id"]
        found = await self.core.responses.find(RequestContext.of(request).key, response_id)
        if found is None:
            raise _no_response(response_id)
        return stored_of(found)

    def _without_effect(self, body: PromptFields, chat: ChatRequest) -> list[str]:
        """Return the fields that have no effect. chat: made from the body."""
        model = self.core.thinking_model
        names = body.ignored(can_think=model.has_thoughts or model.has_switch)
        names += unread_variables(chat.template, self.core.engine)
        return names + (ignored_in(body.input) if isinstance(body.input, list) else [])

    def _head(self, body: ResponsesRequest) -> ResponseObject:
        defaults = self.core.engine.default_params
        text = {"format": {"type": "text"}, "verbosity": "medium"}
        if body.text is not None and body.text.format is not None:
            text["format"] = body.text.format
        return ResponseObject(
            id=new_id("resp"),
            created_at=int(time.time()),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self.shown_model(body.model),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": body.effort, "summary": None},
            safety_identifier=body.safety_identifier,
            store=body.is_stored,
            temperature=defaults.temperature if body.temperature is None else body.temperature,
            text=text,
            tool_choice=body.tool_choice or "auto",
            tools=[tool.plain() for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=defaults.top_p if body.top_p is None else body.top_p,
            user=body.user,
        )


def _answer(body: ResponsesRequest, head: ResponseObject, keep: Keep | None, generation: Generation) -> ResponsesAnswer:
    encodes_thoughts = ENCRYPTED_CONTENT in (body.include or ())
    items = OutputItems(
        wants_logprobs=body.wants_logprobs, encodes_thoughts=encodes_thoughts, namespaces=body.offer().namespaces
    )
    return ResponsesAnswer(generation, head, items, body.wants_logprobs, keep)


def _page_of(items: Sequence[Item], query: Any) -> ItemList:
    """Return the items that a client asks for. Raises InvalidRequestError."""
    limit, order, after = query.get("limit", str(_DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequestError(f"limit must be a number from 1 to {MAX_PAGE}; got {limit[:32]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc; got {order[:32]!r}", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((place for place, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise InvalidRequestError(f"after names {after[:80]!r}, which is no item of this response", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    ends = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(ordered) > len(page))


def _further_parameters(request: Request, *known: str) -> list[str]:
    """Return the parameters of a URL that have no effect."""
    return [name for name in dict.fromkeys(request.query_params) if name not in known]


def _no_response(response_id: str, *, is_previous: bool = False) -> ApiError:
    message = f"there is no stored response {response_id[:80]!r}: {_GONE}"
    if is_previous:
        message += "; send the conversation as input"
        return ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return ApiError(404, message, param="id", code="response_not_found")
