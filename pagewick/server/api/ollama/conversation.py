"""Messages of Ollama's API, and those for the core that they become."""

from __future__ import annotations

import base64
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images.headers import FORMAT_NAMES, NUM_BEGINNING_BYTES, format_of
from pagewick.server.api.images import IMAGE_ROLES, READS_TEXT_ONLY, checked_url, data_url, image_part


class CalledFunction(Struct, kw_only=True):
    """arguments: an object; some clients send it as a text in JSON."""

    name: str
    arguments: dict[str, Any] | str | None = None


class MadeCall(Struct, kw_only=True):
    """A call that the model has made."""

    function: CalledFunction
    id: str | None = None


class OllamaMessage(Struct, kw_only=True):
    """thinking: the model's thoughts. images: files in base64.

    tool_name, tool_call_id: the call that this answers. name: former name of tool_name.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[MadeCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def called(self) -> str | None:
        """The name of the tool that this answers."""
        return self.tool_name or self.name


def is_continued(messages: Sequence[OllamaMessage]) -> bool:
    """Whether the response goes on from the last message, as in Ollama."""
    return bool(messages) and messages[-1].role == "assistant" and bool(messages[-1].content)


def messages_of(
    messages: Sequence[OllamaMessage], *, reads_images: bool, are_given: bool = True
) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form.

    A result without an id answers the first call before it, of its name if it has one, that has no result yet.
    are_given: whether the request has these messages, which errors then name.
    Raises InvalidRequestError for images of an unknown type or in the wrong place, UnsupportedError if the model reads
    none.
    """
    made: list[dict[str, Any]] = []
    calls = _OpenCalls()
    for place, message in enumerate(messages):
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.images:
            where = f"messages[{place}].images" if are_given else "images"
            plain["content"] = _with_images(message, where, reads_images=reads_images)
        if message.tool_calls:
            plain["tool_calls"] = [_call(call, f"call_{place}_{i}") for i, call in enumerate(message.tool_calls)]
            for call in plain["tool_calls"]:
                calls.add(call["id"], call["function"]["name"])
        if message.role == "tool":
            if (answered := calls.take(message.tool_call_id, message.called)) is not None:
                plain["tool_call_id"] = answered
            if message.called:
                plain["name"] = message.called
        made.append(plain)
    return made


def _call(call: MadeCall, made_id: str) -> dict[str, Any]:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": text}
    return {"id": call.id or made_id, "type": "function", "function": function}


class _OpenCalls:
    """The calls that have no result yet. Each is looked at a few times, however many there are."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._in_order: dict[str | None, deque[str]] = defaultdict(deque)  # by name; None: all

    def add(self, call_id: str, name: str) -> None:
        self._ids.add(call_id)
        for key in (None, name):
            self._in_order[key].append(call_id)

    def take(self, call_id: str | None, name: str | None) -> str | None:
        """Return the id that a result has, or else that of the first open call of this name; None: of any."""
        waiting = self._in_order[name or None]
        while call_id is None and waiting:
            first = waiting.popleft()
            call_id = first if first in self._ids else None
        self._ids.discard(call_id or "")
        return call_id


def _with_images(message: OllamaMessage, where: str, *, reads_images: bool) -> list[dict[str, Any]]:
    if not reads_images:
        raise UnsupportedError(f"{READS_TEXT_ONLY}; leave out {where}", param=where)
    if message.role not in IMAGE_ROLES:
        raise InvalidRequestError(f"{where}: only messages of the roles user and tool may have images", param=where)
    parts = [image_part(_address(image, f"{where}[{place}]")) for place, image in enumerate(message.images or ())]
    # Ollama, too, puts images before the text.
    return [*parts, {"type": "text", "text": message.content or ""}]


def _address(image: str, where: str) -> str:
    if image.startswith("data:"):
        return checked_url(image, where)
    # Ollama's clients do not name the types of images.
    beginning = image[: NUM_BEGINNING_BYTES // 3 * 4].translate({ord("-"): "+", ord("_"): "/"})
    try:
        kind = format_of(base64.b64decode(beginning))
    except ValueError:
        kind = None
    if kind is None:
        message = f"{where} must be the file of an image in base64, in the format {FORMAT_NAMES}"
        raise InvalidRequestError(message, param=where)
    return data_url(kind.media_type, image)
