"""ChatMessage: one message of a conversation, as OpenAI and vLLM write it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import Struct

from pagewick.errors import InvalidRequestError


class RanCall(Struct):
    """A ServerToolCall that a client sends back."""

    id: str
    name: str
    arguments: str
    result: str | None = None
    round: int = 0


class ChatMessage(Struct, omit_defaults=True):
    """content: a text, or a list of parts, which are texts and images. reasoning_content: the model's thoughts.

    reasoning: vLLM's and OpenRouter's newer name for reasoning_content. server_tool_calls: the calls that the server
    ran for an earlier response, as that had them.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    server_tool_calls: list[RanCall] | None = None

    @property
    def text(self) -> str:
        """Text of the content; its other parts are left out."""
        if isinstance(self.content, list):
            texts = [part.get("text") for part in self.content if part.get("type") == "text"]
            return "\n".join(text for text in texts if isinstance(text, str))
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """Return plain data for the chat template, which knows thoughts as reasoning_content."""
        message: dict[str, Any] = msgspec.to_builtins(self)
        reasoning = message.pop("reasoning", None)
        if reasoning is not None:
            message.setdefault("reasoning_content", reasoning)
        message.pop("server_tool_calls", None)
        return message


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return a conversation for the chat template. The calls that the server ran become messages of their own.

    Raises InvalidRequestError if another message than the assistant's has some.
    """
    plain: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message.server_tool_calls:
            if message.role != "assistant":
                where = f"messages[{place}].server_tool_calls"
                raise InvalidRequestError(f"{where} is for messages of the assistant; leave it out", param=where)
            for _, calls in groupby(message.server_tool_calls, key=lambda call: call.round):
                plain += _round_of(list(calls))
            if not (message.content or message.tool_calls or message.function_call):
                continue
        plain.append(message.plain())
    return plain


def _round_of(calls: Sequence[RanCall]) -> list[dict[str, Any]]:
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": call.result or ""} for call in calls
    ]
    return [{"role": "assistant", "content": "", "tool_calls": made}, *results]
