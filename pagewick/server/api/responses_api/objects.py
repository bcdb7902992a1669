"""The objects that the Responses API sends: responses, their items, and the events of a stream. Names are OpenAI's."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from pagewick.server.api.responses import ContentLogprob
from pagewick.server.errors import ErrorDetail

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, tag_field="type", tag="output_text", kw_only=True):
    """annotations: always empty. logprobs: empty unless the request asks for them."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class OutputRefusal(Struct, tag_field="type", tag="refusal"):
    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputText | OutputRefusal] = []


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    """content: the model's thoughts. summary: always empty. encrypted_content: null unless the request asks for it."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call", kw_only=True):
    """arguments: JSON. namespace: that of the function, if it has one."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem
ContentPart = OutputText | OutputRefusal | ReasoningText


class InputTokensDetails(Struct):
    """cache_write_tokens: always 0, since to write into the cache costs nothing here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Struct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(Struct, kw_only=True):
    """A response. Fields that echo the request have the values that were used."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    background: bool = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream. type: its kind, which decides the further fields; it is the name of the event, too."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: ContentPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET


class ResponseDeleted(Struct, kw_only=True):
    id: str
    object: str = "response.deleted"
    deleted: bool = True


class ItemList(Struct, kw_only=True):
    """A page of a response's input items, which the server has given ids where they had none."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(Struct, kw_only=True):
    """input_tokens: tokens of the prompt."""

    object: str = "response.input_tokens"
    input_tokens: int
