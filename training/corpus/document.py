"""A training document is a chat; `render` writes it exactly as the chat template does, marking what is learnt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

NO_THINKING = "<think>\n\n</think>\n\n"
TOOLS_HEADER = "# Tools\n\nYou may call these functions. Their signatures are inside <tools></tools>:\n<tools>"
TOOLS_FOOTER = (
    "\n</tools>\n\nTo call a function, write its name and arguments as a JSON object inside <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
)


@dataclass(frozen=True)
class Document:
    """One chat: `messages` and `tools` in the API's shape; every assistant message is learnt."""

    kind: str
    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    skip_thinking: bool = False


class Segment(NamedTuple):
    """A piece of a rendered chat; only supervised pieces count in the loss."""

    text: str
    is_supervised: bool


def chat(kind: str, question: str, answer: str) -> Document:
    """A document of one question and one answer."""
    return Document(kind, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def tool_call_text(call: dict[str, Any]) -> str:
    """A call `{"name": ..., "arguments": {...}}` inside its tags."""
    return "<tool_call>\n" + json.dumps(call, ensure_ascii=False) + "\n</tool_call>"


def _head(document: Document, system: str | None) -> list[str]:
    if not document.tools:
        return [] if system is None else [f"<|im_start|>system\n{system}<|im_end|>\n"]
    text = "<|im_start|>system\n" + ("" if system is None else system + "\n\n") + TOOLS_HEADER
    text += "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in document.tools)
    return [text + TOOLS_FOOTER + "<|im_end|>\n"]


def _assistant_text(message: dict[str, Any]) -> str:
    parts = [message["content"]] if message["content"] else []
    parts += [tool_call_text(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join(parts)


def render(document: Document) -> list[Segment]:
    """The chat as text pieces. Their concatenation equals the chat template's output for the same messages, but for
    the empty thinking block before the last answer, which the template writes as the generation prompt only."""
    messages = document.messages
    has_system = messages[0]["role"] == "system"
    pending = "".join(_head(document, messages[0]["content"] if has_system else None))
    segments: list[Segment] = []
    body = messages[1:] if has_system else messages
    roles = [message["role"] for message in body] + [""]
    for index, message in enumerate(body):
        if message["role"] == "user":
            pending += f"<|im_start|>user\n{message['content']}<|im_end|>\n"
        elif message["role"] == "tool":
            pending += "" if roles[index - 1] == "tool" else "<|im_start|>user"
            pending += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            pending += "" if roles[index + 1] == "tool" else "<|im_end|>\n"
        else:
            pending += "<|im_start|>assistant\n"
            if document.skip_thinking and index == len(body) - 1:
                pending += NO_THINKING
            segments.append(Segment(pending, False))
            segments.append(Segment(_assistant_text(message) + "<|im_end|>", True))
            pending = "\n"
    return segments
