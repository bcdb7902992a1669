"""ToolPrompts: tools, calls and results in prompts, whatever a model's chat template knows of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pagewick.errors import InvalidRequestError, PagewickError, UnsupportedError
from pagewick.text.content_parts import has_images, text_content
from pagewick.text.tool_calls.messages import Message, has_calls, with_checked_calls
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

Tools = Sequence[Mapping[str, Any]]
# Renders a conversation with tools; raises PagewickError if the template refuses.
Render = Callable[[Sequence[Message], Tools | None], str]

# The words that a template writes if it knows tools, calls and results.
_NAME, _VALUE, _OTHER, _RESULT, _SYSTEM = "probe_tool", "probe_value", "other_value", "probe_result", "probe_system"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_USER = {"role": "user", "content": "Hi"}
# Some templates write any role, even one that the model does not know.
_RESULT_ROLE = re.compile(r"""['"](tool|ipython|tool_results|observation|tool_response)['"]""")


def _call(call_id: str, value: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": json.dumps({"key": value})}}


def _answer(call_id: str, value: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": value}


@dataclass(frozen=True)
class TemplateTools:
    """A template's abilities: it lists tools, writes calls, several calls of a message, results, system messages.

    needs_text: it refuses a message with calls whose content is null, but takes one whose content is empty.
    """

    lists_tools: bool
    writes_calls: bool
    writes_several: bool
    writes_results: bool
    has_system: bool
    needs_text: bool = False

    @classmethod
    def of(cls, render: Render, sources: Sequence[str], *, has_result_role: bool = False) -> TemplateTools:
        """Find out a template's abilities by rendering short conversations.

        has_result_role: whether the model knows the role of results although the template may not name it.
        """

        def writes(messages: Sequence[Message], *words: str, tools: Tools | None = (_TOOL,)) -> bool:
            try:
                text = render(messages, tools)
            except PagewickError:
                return False
            return all(word in text for word in words)

        one, other = _call("probe0001", _VALUE), _call("probe0002", _OTHER)
        results: list[Message] = [_answer("probe0001", _RESULT)]

        def calling(content: str | None, *calls: Any) -> list[Message]:
            return [_USER, {"role": "assistant", "content": content, "tool_calls": [*calls]}, *results]

        def writes_call(content: str | None) -> bool:
            called = calling(content, one)
            return writes(called, _VALUE, tools=None) or writes(called, _VALUE)

        writes_null = writes_call(None)
        needs_text = not writes_null and writes_call("")
        content = "" if needs_text else None
        has_role = has_result_role or any(_RESULT_ROLE.search(source) for source in sources)
        return cls(
            lists_tools=writes([_USER], _NAME),
            writes_calls=writes_null or needs_text,
            writes_several=writes([*calling(content, one, other), _answer("probe0002", _RESULT)], _VALUE, _OTHER),
            writes_results=has_role and (writes(calling(content, one), _RESULT) or writes(results, _RESULT)),
            has_system=writes([{"role": "system", "content": _SYSTEM}, _USER], _SYSTEM, tools=None),
            needs_text=needs_text,
        )


class ToolPrompts:
    """Adapts messages and tools to one template. form: how the model writes calls."""

    def __init__(self, form: CallFormat, render: Render, sources: Sequence[str]) -> None:
        self._form = form
        self._render = render
        self._sources = sources

    @cached_property
    def support(self) -> TemplateTools:
        return TemplateTools.of(self._render, self._sources, has_result_role=self._form.has_result_role)

    def prepared(
        self, messages: Sequence[Message], tools: Tools | None, *, is_continued: bool = False
    ) -> tuple[Sequence[Message], Tools | None]:
        """Return what to render. is_continued: the response goes on from the text of the last message.

        Raises InvalidRequestError for calls and results that do not belong together.
        """
        is_written = has_calls(messages[:-1] if is_continued else messages)
        is_described = bool(tools) and not self.support.lists_tools
        if is_written or is_described:
            # Some messages become parts of others here, where the template's own check would not see what is no text.
            for place, message in enumerate(messages):
                if not has_images(content := message.get("content")):
                    text_content(content, f"messages[{place}].content")
        if is_written:
            messages = self._with_calls(with_checked_calls(messages, self._form.prompt_id))
        if tools and is_described:
            return self._described(messages, tools), None
        return messages, tools

    def _with_calls(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        support = self.support
        if support.writes_calls and not support.writes_several:
            messages = _one_call_each(messages)
        written: list[dict[str, Any]] = []
        for message in messages:
            if "tool_calls" in message and not support.writes_calls:
                message = {**message, "content": _joined(message.get("content"), self._calls_of(message))}
                del message["tool_calls"]
            elif "tool_calls" in message and support.needs_text and message.get("content") is None:
                message = {**message, "content": ""}
            elif message["role"] == "tool" and not support.writes_results:
                if has_images(message.get("content")):
                    reason = "this model reads no images in the results of tools; send them in a message of the user's"
                    raise UnsupportedError(reason, param="messages")
                text = f"<tool_response>\n{_text_of(message.get('content'))}\n</tool_response>"
                if written and written[-1].get("is_result"):
                    written[-1]["content"] += f"\n{text}"
                    continue
                message = {"role": "user", "content": text, "is_result": True}
            written.append(message)
        return [{key: value for key, value in one.items() if key != "is_result"} for one in written]

    def _calls_of(self, message: Message) -> str:
        found = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append(WrittenCall(function["name"], text))
        return self._form.written(found)

    def _described(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        """Put a description of the tools into the system message, or into the first message without one."""
        text = description_of(tools, self._form)
        if messages and messages[0].get("role") in ("system", "developer"):
            first, rest = messages[0], messages[1:]
            return [{**first, "content": _joined(first.get("content"), text)}, *rest]
        if self.support.has_system:
            return [{"role": "system", "content": text}, *messages]
        if not messages or messages[0].get("role") != "user":
            message = "this model has no system role, and its tools are described in the first message, the user's"
            raise InvalidRequestError(message, param="messages")
        return [{**messages[0], "content": _joined_before(text, messages[0].get("content"))}, *messages[1:]]


def description_of(tools: Tools, form: CallFormat) -> str:
    """Return what a model without tools in its template is told about them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.written([WrittenCall("function_name", '{"argument": "value"}')])
    return (
        f"# Functions\n\nYou may call these functions, each with the schema of its arguments:\n\n{listed}\n\n"
        f"To call one, write exactly this form, with its own name and arguments, and nothing behind it:\n\n{example}"
        "\n\nThe next message then has its result."
    )


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each call a message of its own, followed by its result."""
    split: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            split.append(message)
            continue
        results: dict[Any, dict[str, Any]] = {}
        while place < len(messages) and messages[place]["role"] == "tool":
            results[messages[place].get("tool_call_id")] = messages[place]
            place += 1
        for index, call in enumerate(calls):
            split.append({**message, "tool_calls": [call]} if index == 0 else {**_bare(message), "tool_calls": [call]})
            if call["id"] in results:
                split.append(results[call["id"]])
    return split


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": None}


def _joined(content: Any, text: str) -> str | list[Any]:
    if has_images(content):
        return [*content, {"type": "text", "text": f"\n\n{text}"}]
    return f"{before}\n\n{text}" if (before := _text_of(content)) else text


def _joined_before(text: str, content: Any) -> str | list[Any]:
    if has_images(content):
        return [{"type": "text", "text": f"{text}\n\n"}, *content]
    return f"{text}\n\n{_text_of(content)}"


def _text_of(content: Any) -> str:
    """Return the text of a checked content."""
    return text_content(content, "messages") or ""
