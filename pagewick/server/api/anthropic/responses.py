"""The bodies that the Messages API sends: messages, events and errors. Field names are Anthropic's."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"
]  # fmt: skip


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """signature: the same for all thoughts; nothing is signed."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call. input: its arguments; those of a call that max_tokens has cut off lack the last one."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(Struct):
    """thinking_tokens: tokens of thought, which output_tokens counts, too."""

    thinking_tokens: int


class MessageUsage(Struct):
    """input_tokens: tokens of the prompt that were computed. cache_read_input_tokens: those found in the prefix cache.

    cache_creation_input_tokens: 0, since nothing is stored beside what every request leaves in the prefix cache.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(Struct, tag_field="type", tag="message"):
    """stop_reason: null only at the beginning of a stream. stop_sequence: the one that ended the response."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """partial_json: a piece of a call's input; all pieces, joined, are the JSON of the input."""

    partial_json: str


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """usage: of the whole response."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(Struct, tag_field="type", tag="ping"):
    """It means nothing."""


Event = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
EVENTS = (MessageStart, ContentBlockStart, ContentBlockDelta, ContentBlockStop, MessageDelta, MessageStop, Ping)


class TokenCount(Struct):
    """input_tokens: tokens of the prompt."""

    input_tokens: int


class ErrorDetails(Struct):
    """error_code: names the cause, where a client can go on without what the server does not have."""

    error_code: str


class MessagesErrorDetail(Struct):
    """type: a word for programs. message: the cause and the fix."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessagesError(Struct, tag_field="type", tag="error", omit_defaults=True):
    """request_id: also in the header request-id; an error in a stream has it only there."""

    error: MessagesErrorDetail
    request_id: str = ""
