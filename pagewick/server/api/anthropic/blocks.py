"""Content blocks of a request, and the messages for the core that they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from msgspec import Struct

from pagewick.errors import InvalidRequestError, UnsupportedError

# Claude Code begins its instructions with a block that says which version of it asks. The block has a number that
# differs between requests: in the prompt, it would keep everything after it from being found in the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header:"


class TextBlockParam(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlockParam(Struct, tag_field="type", tag="thinking", kw_only=True):
    """signature: not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlockParam(Struct, tag_field="type", tag="redacted_thinking"):
    """data: thoughts that only Anthropic's own models can read; they are left out."""

    data: str


class ToolUseBlockParam(Struct, tag_field="type", tag="tool_use"):
    """A call that the model has made. input: its arguments."""

    id: str
    name: str
    input: dict[str, Any]


class ImageBlockParam(Struct, tag_field="type", tag="image"):
    """Refused: the model reads text only."""


class DocumentBlockParam(Struct, tag_field="type", tag="document"):
    """Refused: the model reads text only."""


class ToolResultBlockParam(Struct, tag_field="type", tag="tool_result", kw_only=True):
    """tool_use_id: the id of the call. content: what the tool returned. is_error: whether it failed."""

    tool_use_id: str
    content: str | list[TextBlockParam | ImageBlockParam | DocumentBlockParam] | None = None
    is_error: bool | None = None


Block = (
    TextBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
    | ImageBlockParam
    | DocumentBlockParam
)
System = str | list[TextBlockParam]


class InputMessage(Struct):
    """content: a text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Conversation:
    """A conversation in the core's form.

    messages: they have OpenAI's form. ignored: what of the conversation is no part of them. is_continued: whether the
    response goes on from the last message.

    Messages of one role in a row are one message, as in Anthropic's API. takes_late_instructions: see Core; without, a
    system message behind others is a part of the user's message, between tags that tell them apart.

    Raises InvalidRequestError for blocks that do not belong where they are, and UnsupportedError for those that are no
    text.
    """

    def __init__(
        self, system: System | None, messages: Sequence[InputMessage], *, takes_late_instructions: bool = True
    ) -> None:
        self._takes_late_instructions = takes_late_instructions
        self.messages: list[dict[str, Any]] = []
        self.ignored: list[str] = []
        self._open_ids: set[str] = set()  # of calls that have no result yet
        if system is not None:
            self._add_system(system)
        for place, message in enumerate(messages):
            where = f"messages[{place}]"
            blocks = [TextBlockParam(message.content)] if isinstance(message.content, str) else message.content
            add = {"user": self._add_user, "assistant": self._add_assistant, "system": self._add_instructions}
            add[message.role](blocks, where)
        self.is_continued = self._ends_with_beginning(f"messages[{len(messages) - 1}]")
        for made in self.messages:
            _simplify(made)

    def _add_system(self, system: System) -> None:
        texts = [system] if isinstance(system, str) else [block.text for block in system]
        if texts and texts[0].startswith(BILLING_HEADER):
            self.ignored.append("system" if isinstance(system, str) else "system[0]")
            # As one text the header is its first line.
            texts[0] = texts[0].partition("\n")[2].lstrip("\n")
            texts = texts if texts[0] else texts[1:]
        if any(texts):
            self._turn("system", texts)

    def _add_instructions(self, blocks: Sequence[Block], where: str) -> None:
        self._open_ids.clear()
        texts = [self._text(block, f"{where}.content[{place}]") for place, block in enumerate(blocks)]
        is_late = bool(self.messages) and self.messages[-1]["role"] != "system"
        if is_late and not self._takes_late_instructions:
            self._turn("user", [f"<system-reminder>\n{text}\n</system-reminder>" for text in texts])
        else:
            self._turn("system", texts)

    def _add_user(self, blocks: Sequence[Block], where: str) -> None:
        texts: list[str] = []
        for place, block in enumerate(blocks):
            inner = f"{where}.content[{place}]"
            if isinstance(block, ToolResultBlockParam):
                if texts:
                    _refuse(f"{inner} is a tool_result after a text; put all results first", inner)
                self._add_result(block, inner)
            else:
                texts.append(self._text(block, inner))
        if texts or not blocks:
            self._open_ids.clear()
            self._turn("user", texts)

    def _add_result(self, block: ToolResultBlockParam, where: str) -> None:
        if block.tool_use_id not in self._open_ids:
            known = ", ".join(sorted(map(repr, self._open_ids)))[:200] or "none"
            message = (
                f"{where}.tool_use_id {block.tool_use_id[:80]!r} is not the id of a tool_use block in the message "
                f"before it that has no result yet; these are: {known}"
            )
            _refuse(message, f"{where}.tool_use_id")
        self._open_ids.remove(block.tool_use_id)
        given = [TextBlockParam(block.content)] if isinstance(block.content, str) else block.content or []
        texts = [self._text(one, f"{where}.content[{place}]") for place, one in enumerate(given)]
        # OpenAI's form has no mark for this, so that the model must read it.
        if block.is_error and not any("error" in text.lower() for text in texts):
            texts.insert(0, "Error:")
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": texts})

    def _add_assistant(self, blocks: Sequence[Block], where: str) -> None:
        message = self._turn("assistant", [])
        for place, block in enumerate(blocks):
            inner = f"{where}.content[{place}]"
            match block:
                case ThinkingBlockParam():
                    before = message.get("reasoning_content")
                    message["reasoning_content"] = f"{before}\n{block.thinking}" if before else block.thinking
                case RedactedThinkingBlockParam():
                    self.ignored.append("messages[].content[].data")
                case ToolUseBlockParam():
                    message.setdefault("tool_calls", []).append(self._call(block, inner))
                case _:
                    message["content"].append(self._text(block, inner))

    def _call(self, block: ToolUseBlockParam, where: str) -> dict[str, Any]:
        if not block.name:
            _refuse(f"{where}.name must be the name of a tool", f"{where}.name")
        if block.id in self._open_ids or not block.id:
            _refuse(f"{where}.id {block.id[:80]!r} must be an id that no other call before it has", f"{where}.id")
        self._open_ids.add(block.id)
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        return {"id": block.id, "type": "function", "function": function}

    def _turn(self, role: str, texts: list[str]) -> dict[str, Any]:
        """Return the last message, with these texts added, if it has this role; else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        self.messages[-1]["content"] += texts
        return self.messages[-1]

    def _ends_with_beginning(self, where: str) -> bool:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            return False
        if "tool_calls" in last:
            _refuse(f"{where} has tool_use blocks; send their results after it, in a user message", where)
        if not any(last["content"]):
            if "reasoning_content" in last:
                _refuse(f"{where} has thoughts only; add the beginning of the text, or leave the message out", where)
            self.messages.pop()
            return False
        return True

    @staticmethod
    def _text(block: Block, where: str) -> str:
        match block:
            case TextBlockParam():
                return block.text
            case ImageBlockParam() | DocumentBlockParam():
                kind = block.__struct_config__.tag
                raise UnsupportedError(f"this model reads text only; {where} has type {kind!r}", param=where)
        _refuse(f"{where} has type {block.__struct_config__.tag!r}, which a message of this role cannot have", where)


def _simplify(message: dict[str, Any]) -> None:
    """Make a message's texts its content: a string if there is one text, no content for calls only."""
    texts = message["content"]
    if not texts and "tool_calls" in message:
        del message["content"]
    elif len(texts) <= 1:
        message["content"] = texts[0] if texts else ""
    else:
        message["content"] = [{"type": "text", "text": text} for text in texts]


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
