"""ChatMessage: one message of a conversation, as OpenAI and vLLM write it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct


class ChatMessage(Struct, omit_defaults=True):
    """content: a text, or a list of parts, which are texts and images. reasoning_content: the model's thoughts.

    reasoning: vLLM's and OpenRouter's newer name for reasoning_content.
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
        return message
