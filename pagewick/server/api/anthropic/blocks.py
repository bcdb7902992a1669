"""Content blocks of a request, and the messages for the core that they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from msgspec import Struct

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.images import IMAGE_TYPES, READS_TEXT_ONLY, data_url, image_part

# Claude Code begins its instructions with a block that says which version of it asks. The block has a number that
# differs between requests: in the prompt, it would keep everything after it from being found in the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header:"


_SOURCE = '{"type": "base64", "media_type": "image/png", "data": "..."}'


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


class ImageSource(Struct, kw_only=True):
    """type: base64 only. media_type: one of IMAGE_TYPES. data: the file in base64."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None


class ImageBlockParam(Struct, tag_field="type", tag="image", kw_only=True):
    """An image, for models that read images."""

    source: ImageSource | None = None


class DocumentBlockParam(Struct, tag_field="type", tag="document"):
    """Refused: no model reads documents."""


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
# A text, or an image in OpenAI's form.
_Part = str | dict[str, Any]


class InputMessage(Struct):
    """content: a text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Conversation:
    """A conversation in the core's form.

    messages: they have OpenAI's form. ignored: what of the conversation is no part of them. is_continued: whether the
    response goes on from the last message.

    Messages of one role in a row are one message, as in Anthropic's API. takes_late_instructions: see Core; without, a
    system message behind others is a part of the user's message, between tags that tell them apart. reads_images:
    whether the model reads images beside texts.

    Raises InvalidRequestError for blocks that do not belong where they are, and UnsupportedError for those that the
    model cannot read.
    """

    def __init__(
        self,
        system: System | None,
        messages: Sequence[InputMessage],
        *,
        takes_late_instructions: bool = True,
        reads_images: bool = False,
    ) -> None:
        self._takes_late_instructions = takes_late_instructions
        self._reads_images = reads_images
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
        parts: list[_Part] = []
        for place, block in enumerate(blocks):
            inner = f"{where}.content[{place}]"
            if isinstance(block, ToolResultBlockParam):
                if parts:
                    _refuse(f"{inner} is a tool_result after a text or image; put all results first", inner)
                self._add_result(block, inner)
            else:
                parts.append(self._part(block, inner))
        if parts or not blocks:
            self._open_ids.clear()
            self._turn("user", parts)

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
        parts = [self._part(one, f"{where}.content[{place}]") for place, one in enumerate(given)]
        # OpenAI's form has no mark for this, so that the model must read it.
        if block.is_error and not any(isinstance(part, str) and "error" in part.lower() for part in parts):
            parts.insert(0, "Error:")
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})

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

    def _turn(self, role: str, parts: Sequence[_Part]) -> dict[str, Any]:
        """Return the last message, with these parts added, if it has this role; else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        self.messages[-1]["content"] += parts
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

    def _part(self, block: Block, where: str) -> _Part:
        if isinstance(block, ImageBlockParam) and self._reads_images:
            return image_part(_url_of(block, where))
        return self._text(block, where)

    def _text(self, block: Block, where: str) -> str:
        kind = block.__struct_config__.tag
        match block:
            case TextBlockParam():
                return block.text
            case ImageBlockParam() | DocumentBlockParam() if not self._reads_images:
                raise UnsupportedError(f"{READS_TEXT_ONLY}; {where} has type {kind!r}", param=where)
            case DocumentBlockParam():
                message = f"this model reads text and images; {where} has type {kind!r}"
                raise UnsupportedError(message, param=where)
        _refuse(f"{where} has type {kind!r}, which a message of this role cannot have", where)


def _url_of(block: ImageBlockParam, where: str) -> str:
    source = block.source
    where = f"{where}.source"
    if source is None or source.type is None:
        _refuse(f"{where} must be {_SOURCE}", where)
    if source.type != "base64":
        message = (
            f"{where}.type {source.type[:32]!r} is not supported: this server fetches no addresses and keeps no files"
        )
        raise UnsupportedError(f"{message}; send the image itself: {_SOURCE}", param=f"{where}.type")
    if source.media_type not in IMAGE_TYPES:
        _refuse(f"{where}.media_type must be one of {', '.join(IMAGE_TYPES)}", f"{where}.media_type")
    if not source.data:
        _refuse(f"{where}.data must be the image's file in base64", f"{where}.data")
    return data_url(source.media_type, source.data)


def _simplify(message: dict[str, Any]) -> None:
    """Make a message's parts its content: a string if there is one text, no content for calls only."""
    parts = message["content"]
    if not parts and "tool_calls" in message:
        del message["content"]
    elif not parts:
        message["content"] = ""
    elif len(parts) == 1 and isinstance(parts[0], str):
        message["content"] = parts[0]
    else:
        message["content"] = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
