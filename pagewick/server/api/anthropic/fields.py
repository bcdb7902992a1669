"""The requests of the Messages API. Further fields are those of the other routes, under the same names."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.anthropic.blocks import Conversation, InputMessage, System
from pagewick.server.api.known_fields import KnownFields
from pagewick.server.api.request_fields import one_of, stop_strings
from pagewick.server.api.structured_fields import StructuredFields
from pagewick.server.core.limits import MAX_MESSAGES, check_count
from pagewick.server.core.request import ChatRequest, Template, Thinking
from pagewick.server.core.thinking import ThinkingModel
from pagewick.text.tool_calls.offer import Mode, ToolChoice

_BLOCK = frozenset({"type", "cache_control"})
_TEXT = _BLOCK | {"text", "citations"}
# cache_control has no effect, since every prefix is cached; nor has eager_input_streaming, since inputs are always
# streamed as they come.
ANTHROPIC_FIELDS = KnownFields(
    unsupported={"container": (), "mcp_servers": ([],), "thread": ()},
    harmless=frozenset({"cache_control", "metadata", "service_tier"}),
    in_messages=frozenset({"role", "content"}),
    in_parts={
        "text": _TEXT,
        "thinking": _BLOCK | {"thinking", "signature"},
        "redacted_thinking": _BLOCK | {"data"},
        "tool_use": _BLOCK | {"id", "name", "input", "caller"},
        "tool_result": _BLOCK | {"tool_use_id", "content", "is_error"},
        "image": _BLOCK | {"source"},
        "image.source": frozenset({"type", "media_type", "data"}),
    },
    inside={"system[]": _TEXT, "tools[]": frozenset({"cache_control", "eager_input_streaming"})},
)
# Anthropic's names for fields of the core.
_NAMES = {
    "tools[].function": "tools[]",
    "tools[].function.parameters": "tools[].input_schema",
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}


class MessagesTool(Struct, kw_only=True):
    """A tool that the client runs. input_schema: a JSON schema of its input."""

    type: str | None = None
    name: str | UnsetType = UNSET
    description: str | None = None
    input_schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | None = None

    def check(self, where: str) -> None:
        """Raises UnsupportedError for tools that Anthropic's server or its models know, InvalidRequestError."""
        if self.type not in (None, "custom"):
            message = (
                f"{where}.type {str(self.type)[:64]!r} is not supported: this server runs no tools, and its model "
                "knows only those with an input_schema; leave it out"
            )
            raise UnsupportedError(message, param=f"{where}.type")
        for field in ("name", "input_schema"):
            if getattr(self, field) is UNSET:
                raise InvalidRequestError(f"{where}.{field} is missing", param=f"{where}.{field}")

    def plain(self) -> dict[str, Any]:
        """Return a checked tool in OpenAI's form, which the core and chat templates read."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": {name: one for name, one in function.items() if one is not None}}


class MessagesToolChoice(Struct, kw_only=True):
    """type: auto, any (at least one call), tool (one call of the tool `name`) or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def plain(self) -> ToolChoice:
        """Raises InvalidRequestError."""
        if (self.type == "tool") != (self.name is not None):
            message = 'tool_choice needs a name if its type is "tool", and takes none otherwise'
            raise InvalidRequestError(message, param="tool_choice.name")
        if self.name is not None:
            return ToolChoice("required", (self.name,), is_parallel=False)
        mode: Mode = "none" if self.type == "none" else "auto" if self.type == "auto" else "required"
        return ToolChoice(mode, is_parallel=not self.disable_parallel_tool_use)


class MessagesThinking(Struct, kw_only=True):
    """budget_tokens: upper limit of tokens of thought. display: omitted leaves the thoughts out of the response."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct):
    """schema: a JSON schema that the text of the response fits."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """effort: limits the tokens of thought, as reasoning_effort does in chats. format: the form of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(StructuredFields, kw_only=True):
    """A request of which only the tokens are counted; it may have all fields of MessagesRequest.

    model: a name of the model; the default is the model that is served.
    messages: the conversation. If the last message is the assistant's, the response continues it.
    system: instructions; a text or a list of text blocks. stop_sequences: strings that end the response.
    stream: send the response as it is generated.
    tools: those that the model may call. tool_choice: which of them it calls.
    thinking: whether the model thinks, and how much. output_config: effort, and the form of the text.
    output_format: former place of output_config.format. stop: another name of stop_sequences.
    n: there is one response. prompt_logprobs: refused, since a response has no place for them.
    """

    messages: list[InputMessage]
    model: str | None = None
    system: System | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def __post_init__(self) -> None:
        check_count("messages", len(self.messages), MAX_MESSAGES)
        for place, tool in enumerate(self.tools or ()):
            tool.check(f"tools[{place}]")
        one_of(stop_sequences=self.stop_sequences, stop=self.stop)
        if self.n not in (None, 1):
            raise InvalidRequestError(f"n must be 1, since a message is one response; got {self.n}", param="n")
        if self.prompt_logprobs is not None:
            raise UnsupportedError(
                "prompt_logprobs is not a field of this route; leave it out", param="prompt_logprobs"
            )

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    def ignored_names(self, model: ThinkingModel) -> list[str]:
        """Return the fields that ask for thoughts, if the model has none."""
        if model.has_thoughts or model.has_switch:
            return []
        wanted = {
            "thinking": self.thinking is not None and self.thinking.type == "enabled",
            "output_config.effort": self.output_config is not None and self.output_config.effort is not None,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def chat_request(self, conversation: Conversation) -> ChatRequest:
        """Make the core's request. conversation: made from `system` and `messages`. Raises InvalidRequestError."""
        stop = stop_strings(self.stop) if self.stop_sequences is None else self.stop_sequences
        return ChatRequest(
            is_stream=bool(self.stream),
            sampling=self.sampling(**({} if stop is None else {"stop": stop})),
            lowers_max_tokens=True,
            names={**self.names(), **_NAMES},
            serving=self.serving(),
            messages=conversation.messages,
            template=Template(continue_final_message=conversation.is_continued),
            thinking=self._thinking(),
            tools=[tool.plain() for tool in self.tools or ()],
            tool_choice=ToolChoice() if self.tool_choice is None else self.tool_choice.plain(),
        )

    def _thinking(self) -> Thinking:
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return Thinking(effort=effort)
        is_wanted = {"enabled": True, "disabled": False, "adaptive": None}[self.thinking.type]
        return Thinking(is_wanted, effort, self.thinking.budget_tokens)

    def _forms(self) -> dict[str, dict[str, Any] | None]:
        inner = None if self.output_config is None else self.output_config.format
        given = {"output_config.format": inner, "output_format": self.output_format}
        forms = super()._forms()
        for name, one in given.items():
            forms[name] = None if one is None else {"json": one.schema}
        return forms


class MessagesRequest(CountTokensRequest, kw_only=True):
    """max_tokens: upper limit of new tokens; the context is one, too."""

    max_tokens: int
