"""The requests of the Responses API. Field names are OpenAI's; docs/responses.md explains each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from msgspec import Struct

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.conversation_fields import ReasoningEffort
from pagewick.server.api.known_fields import KnownFields
from pagewick.server.api.request_fields import ServingFields
from pagewick.server.api.responses_api.input_items import CONTENT_FIELDS, ITEM_FIELDS, Conversation
from pagewick.server.api.responses_api.tools import Offer, ResponsesTool, choice_as_in_chats, offer_of
from pagewick.server.api.tool_fields import choice_of
from pagewick.server.core.request import ChatRequest, Template, Thinking
from pagewick.structured_outputs import StructuredOutputsParams

ENCRYPTED_CONTENT = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
# These ask for more about items that no response of this server has.
_NEVER_HERE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_INCLUDED = (ENCRYPTED_CONTENT, LOGPROBS, *_NEVER_HERE)

_ELSEWHERE = "is not a field of this route"
_REASONS = {
    "background": "is not supported: stream the response, or wait for it",
    "conversation": "is not supported: go on from a response with previous_response_id",
    "messages": f"{_ELSEWHERE}: send input",
    "n": f"{_ELSEWHERE}: a response is one choice",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), f"{_ELSEWHERE}: send max_output_tokens"),
    "response_format": f"{_ELSEWHERE}: send text.format",
    "reasoning_effort": f"{_ELSEWHERE}: send reasoning.effort",
    "logprobs": f"{_ELSEWHERE}: send include with {LOGPROBS}",
    "functions": f"{_ELSEWHERE}: send tools",
    "function_call": f"{_ELSEWHERE}: send tool_choice",
    "prompt": "is not supported: send instructions and input",
}
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_REASONS, ()),
    "background": (False,),
    "n": (1,),
    "context_management": ([],),
    "moderation": (),
    **dict.fromkeys(("structured_outputs", "grammar", "json_schema", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json_object", "constraint"), ()),
}
_FORMATS = frozenset({"type", "name", "description", "schema", "strict"})
RESPONSES_FIELDS = KnownFields(
    unsupported=_REFUSED,
    harmless=frozenset({
        "client_metadata", "prompt_cache_options", "prompt_cache_retention", "service_tier",
    }),
    inside={
        "input[]": ITEM_FIELDS,
        "input[].content[]": CONTENT_FIELDS,
        "input[].output[]": CONTENT_FIELDS,
        "text.format": _FORMATS,
        "tool_choice": frozenset({"type", "name", "namespace", "mode", "tools"}),
    },
    reasons=_REASONS,
)  # fmt: skip


class ResponsesStreamOptions(Struct):
    """include_obfuscation: no effect here."""

    include_obfuscation: bool | None = None


class ReasoningOptions(Struct):
    """effort: how much the model may think. summary, generate_summary: no effect; thoughts come as they are."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Struct):
    """format: text, json_object or json_schema. verbosity: medium only."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def form(self) -> StructuredOutputsParams | None:
        """Raises InvalidRequestError, UnsupportedError."""
        match self.format or {"type": "text"}:
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return StructuredOutputsParams(json_object=True)
            case {"type": "json_schema", "schema": dict(schema)}:
                return StructuredOutputsParams(json=schema)
            case {"type": "json_schema"}:
                message = 'text.format needs a schema: {"type": "json_schema", "name": ..., "schema": {...}}'
                raise InvalidRequestError(message, param="text.format.schema")
            case other:
                message = f"text.format of type {str(other.get('type'))[:32]!r} is not supported: "
                raise UnsupportedError(f"{message}give text, json_object or json_schema", param="text.format")


class PromptFields(ServingFields, kw_only=True):
    """The fields that decide about the prompt. `input` is optional where there is something else to go on from.

    input: a text, or items: messages, calls and their results, thoughts, references to stored items.
    instructions: the system message of this response; later responses do not inherit it.
    model: a name of the model; the default is the model that is served.
    previous_response_id: a stored response, from whose conversation this one goes on.
    tools: functions that the model may call, and namespaces with functions.
    tool_choice: none, auto, required, one function, or some of them.
    parallel_tool_calls: false allows one call per response.
    text: the form of the text. reasoning: how the model thinks. truncation: disabled only.
    chat_template_kwargs: variables of the chat template. enable_thinking: whether the model thinks.
    thinking_budget: upper limit of tokens of thought; -1: no limit.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    model: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        if self.truncation == "auto":
            message = (
                "truncation 'auto' is not supported: shorten the input, or leave it out for an error if it is long"
            )
            raise UnsupportedError(message, param="truncation")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise UnsupportedError("text.verbosity is not supported here; leave it out", param="text.verbosity")

    @property
    def effort(self) -> ReasoningEffort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def ignored(self, *, can_think: bool) -> list[str]:
        """Return the fields that have no effect with this model, or with any."""
        wants_summary = self.reasoning is not None and (self.reasoning.summary or self.reasoning.generate_summary)
        names = {
            "reasoning.effort": not can_think and self.effort not in (None, "none"),
            "enable_thinking": not can_think and bool(self.enable_thinking),
            "reasoning.summary": bool(wants_summary),
        }
        return [name for name, is_ignored in names.items() if is_ignored]

    def chat_request(self, conversation: Conversation) -> ChatRequest:
        """Make the core's request. Raises InvalidRequestError, UnsupportedError."""
        form = None if self.text is None else self.text.form()
        offer = self.offer()
        names = {
            **super().names(),
            **conversation.names,
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "structured_outputs": "text.format",
            **offer.names,
        }
        is_wanted = self.enable_thinking
        if is_wanted is None and self.effort is not None:
            is_wanted = self.effort != "none"
        return ChatRequest(
            sampling=self.sampling(structured_outputs=form),
            names=names,
            serving=self.serving(),
            messages=conversation.messages,
            template=Template(variables=self.chat_template_kwargs or {}),
            thinking=Thinking(is_wanted, self.effort, self.thinking_budget),
            # The Responses API has a store of its own.
            records=False,
            tools=offer.tools,
            tool_choice=choice_of(
                choice_as_in_chats(self.tool_choice), None, is_parallel=self.parallel_tool_calls, is_legacy=False
            ),
        )

    def offer(self) -> Offer:
        """Return the tools. Raises InvalidRequestError, UnsupportedError."""
        return offer_of(self.tools or ())


class ResponsesRequest(PromptFields, kw_only=True):
    """max_output_tokens: upper limit of new tokens, thoughts included.

    stream: send events as the response is generated. stream_options: nothing here has an effect.
    store: keep the response, so that a later request can go on from it; true by default.
    metadata: anything; a response repeats it. user, safety_identifier, prompt_cache_key: repeated, too.
    include: reasoning.encrypted_content, message.output_text.logprobs.
    top_logprobs: also report this number of alternatives. max_tool_calls: no effect, since it limits built-in tools.
    """

    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens must be at least 1; got {self.max_output_tokens}"
            raise InvalidRequestError(message, param="max_output_tokens")
        if unknown := [name for name in self.include or () if name not in _INCLUDED]:
            message = f"include has {unknown[0][:64]!r}, which is not known; it may have {', '.join(_INCLUDED)}"
            raise InvalidRequestError(message, param="include")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequestError(f"top_logprobs needs include with {LOGPROBS!r}", param="top_logprobs")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def chat_request(self, conversation: Conversation) -> ChatRequest:
        return replace(super().chat_request(conversation), is_stream=bool(self.stream))

    def sampling(self, **more: Any) -> dict[str, Any]:
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return super().sampling(max_tokens=self.max_output_tokens, logprobs=logprobs, **more)


class InputTokensRequest(PromptFields, kw_only=True):
    """The fields of a response that decide about its prompt, or change nothing in it."""
