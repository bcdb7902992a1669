"""Input items: they are checked, and become the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.field_errors import field_error
from pagewick.server.api.images import checked_url, image_part, is_without_effect
from pagewick.server.api.responses_api.items import decoded_thoughts, new_id
from pagewick.server.api.responses_api.tools import full_name
from pagewick.server.core.conversations import INSTRUCTIONS
from pagewick.server.core.limits import MAX_MESSAGES, check_count

Item = dict[str, Any]


class InputMessage(Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Item]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Struct, kw_only=True):
    call_id: str
    output: str | list[Item]
    id: str | None = None
    status: str | None = None


class Reasoning(Struct, kw_only=True):
    summary: list[Item] | None = None
    content: list[Item] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class ItemReference(Struct, kw_only=True):
    id: str


_KINDS: Mapping[str, tuple[type[Struct], str]] = {
    "message": (InputMessage, "msg"),
    "function_call": (FunctionCall, "fc"),
    "function_call_output": (FunctionCallOutput, "fco"),
    "reasoning": (Reasoning, "rs"),
    "item_reference": (ItemReference, ""),
}
# Fields of items and of their contents, whatever their types are.
ITEM_FIELDS = frozenset({"type"}).union(*(kind.__struct_fields__ for kind, _ in _KINDS.values()))
CONTENT_FIELDS = frozenset({
    "type", "text", "refusal", "annotations", "logprobs", "cache_control", "image_url", "file_id", "detail",
})  # fmt: skip
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_IMAGE = "input_image"
_NEEDS_MORE = (_IMAGE, "input_file", "input_audio", "computer_screenshot")


def checked_items(given: str | list[Item] | None, *, reads_images: bool = False) -> list[Item]:
    """Return the items of a request, each with its type and an id. reads_images: whether the model does.

    Raises InvalidRequestError, UnsupportedError.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_checked(item, f"input[{place}]", reads_images) for place, item in enumerate(given or ())]


def ignored_in(items: Iterable[Item]) -> list[str]:
    """Return the names of fields of checked items that have no effect."""
    names: dict[str, None] = {}
    for item in items:
        for field_name in ("content", "output"):
            parts = item.get(field_name)
            for part in parts if isinstance(parts, list) else ():
                if part.get("type") == _IMAGE and part.get("detail") not in (None, "auto"):
                    names[f"input[].{field_name}[].detail"] = None
    return list(names)


def _checked(item: Item, where: str, reads_images: bool) -> Item:
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if item.keys() <= {"type", "id"} else "message"
    if kind not in _KINDS:
        message = f"{where}.type {str(kind)[:64]!r} is not supported; items may be {', '.join(_KINDS)}"
        raise UnsupportedError(message, param=f"{where}.type")
    struct, prefix = _KINDS[kind]
    try:
        made = msgspec.convert(item, struct)
    except msgspec.ValidationError as error:
        raise field_error(error, struct, where) from None
    checked = {"type": kind, **item}
    checked["type"] = kind
    if not getattr(made, "id", None):
        checked["id"] = new_id(prefix)
    if isinstance(made, InputMessage) and isinstance(made.content, str):
        own: Item = {"annotations": []} if made.role == "assistant" else {}
        checked["content"] = [{"type": "output_text" if own else "input_text", "text": made.content, **own}]
    _check_contents(made, where, reads_images)
    return checked


def _check_contents(made: Struct, where: str, reads_images: bool) -> None:
    match made:
        case InputMessage():
            _check_parts(made.content, f"{where}.content", reads_images, may_have_images=made.role == "user")
        case FunctionCallOutput():
            _check_parts(made.output, f"{where}.output", reads_images, may_have_images=True)
        case Reasoning():
            _texts(made.content or [], f"{where}.content")
            _texts(made.summary or [], f"{where}.summary")
            if made.encrypted_content and not made.content and decoded_thoughts(made.encrypted_content) is None:
                message = f"{where}.encrypted_content was not made by this server, which cannot read it; leave it out"
                raise InvalidRequestError(message, param=f"{where}.encrypted_content")


def _check_parts(content: str | list[Item], where: str, reads_images: bool, *, may_have_images: bool) -> None:
    for place, part in enumerate(content if isinstance(content, list) else ()):
        inner = f"{where}[{place}]"
        if part.get("type") == _IMAGE and reads_images:
            if not may_have_images:
                message = f"{inner} is an image; only messages of the user and results of functions may have images"
                raise InvalidRequestError(message, param=inner)
            if part.get("file_id"):
                message = f"{inner}.file_id is not supported: this server keeps no files; send the image itself as "
                raise UnsupportedError(f"{message}image_url, a data: address", param=f"{inner}.file_id")
            checked_url(part.get("image_url"), f"{inner}.image_url")
            is_without_effect(part.get("detail"), f"{inner}.detail")
        else:
            _text_of(part, inner, reads="texts and images" if reads_images else "texts")


def _content(content: str | list[Item], where: str) -> str | list[Item]:
    """Return a checked content in the form of chats: one text, or parts."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0].get("type") != _IMAGE:
        return _text_of(content[0], where)
    return [
        image_part(part["image_url"]) if part.get("type") == _IMAGE else {"type": "text", "text": _text_of(part, where)}
        for part in content
    ]


def _texts(content: str | list[Item], where: str) -> list[str]:
    """Return the texts of a content, refusals included. Raises InvalidRequestError, UnsupportedError."""
    if isinstance(content, str):
        return [content]
    return [_text_of(part, f"{where}[{place}]") for place, part in enumerate(content)]


def _text_of(part: Item, where: str, *, reads: str = "texts") -> str:
    kind = part.get("type")
    if kind in _NEEDS_MORE:
        message = f"{where}.type {kind!r} is not supported: this model reads {reads} only"
        raise UnsupportedError(message, param=f"{where}.type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
        message = f"{where} must be a text: an object with the type input_text or output_text, and text"
        raise InvalidRequestError(message, param=where)
    return text


@dataclass
class Conversation:
    """messages: of a chat. names: from those of messages to those of the request; see TextRequest.names."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


def conversation_of(instructions: str | None, before: Sequence[Item], new: Sequence[Item]) -> Conversation:
    """Return the conversation of a request. before: the items of earlier responses.

    Instructions at its beginning become one message, because many chat templates read only the first one.
    Raises InvalidRequestError if there is nothing to respond to, or too much.
    """
    if before and (num_items := len(before) + len(new)) > MAX_MESSAGES:
        too_many = f"the conversation may have at most {MAX_MESSAGES} items; input and the previous response have "
        raise InvalidRequestError(f"{too_many}{num_items}", param="input")
    if not before and not new and instructions is None:
        raise InvalidRequestError("input is missing or empty", param="input")
    if not before and new:
        check_count("input", len(new), MAX_MESSAGES)
    made = Conversation(names={"messages": "input"})
    places = [*("previous_response_id" for _ in before), *(f"input[{place}]" for place in range(len(new)))]
    items = list(zip(places, [*before, *new], strict=True))
    first = [instructions] if instructions is not None else []
    num_first = next((i for i, (_, item) in enumerate(items) if _role(item) not in INSTRUCTIONS), len(items))
    first += ["\n".join(_texts(item["content"], place)) for place, item in items[:num_first]]
    if first:
        role = items[0][1]["role"] if len(first) == 1 and instructions is None else "system"
        made.messages.append({"role": role, "content": "\n\n".join(first)})
        made.names["messages[0]"] = "input[0]" if instructions is None else "instructions"
    for message, where in _messages(items[num_first:]):
        name = f"messages[{len(made.messages)}]"
        made.names |= {name: where, f"{name}.tool_call_id": f"{where}.call_id"}
        made.messages.append(message)
    return made


def _messages(items: Iterable[tuple[str, Item]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield messages, each with the place of its first item. Thoughts, text and calls of a response are one message."""
    own: dict[str, Any] | None = None
    begun_at = ""
    for where, item in items:
        kind = item["type"]
        is_own = kind in ("reasoning", "function_call") or _role(item) == "assistant"
        if own is not None and not (is_own and _goes_on(own, kind)):
            yield _whole(own), begun_at
            own = None
        if not is_own:
            yield _other_message(item, where), where
            continue
        if own is None:
            own, begun_at = {"role": "assistant", "content": ""}, where
        _add(own, item, where)
    if own is not None:
        yield _whole(own), begun_at


def _role(item: Item) -> str | None:
    return item["role"] if item["type"] == "message" else None


def _whole(own: dict[str, Any]) -> dict[str, Any]:
    """Return the assistant's message as clients of chats send it: without a text if there are only calls."""
    return {**own, "content": own["content"] or None} if "tool_calls" in own else own


def _goes_on(own: Mapping[str, Any], kind: str) -> bool:
    """Whether an item belongs to the assistant's message before it: after a text, only calls do."""
    return kind == "function_call" or "tool_calls" in own or not own["content"]


def _add(own: dict[str, Any], item: Item, where: str) -> None:
    if item["type"] == "function_call":
        function = {"name": full_name(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
        own.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif item["type"] == "reasoning":
        own["reasoning_content"] = own.get("reasoning_content", "") + _thoughts(item)
    else:
        own["content"] += "".join(_texts(item["content"], where))


def _thoughts(item: Item) -> str:
    """Return the thoughts; without any, their summary, which another server may have made."""
    for name in ("content", "summary"):
        if texts := _texts(item.get(name) or [], name):
            return "\n".join(texts)
    return decoded_thoughts(item.get("encrypted_content") or "") or ""


def _other_message(item: Item, where: str) -> dict[str, Any]:
    if item["type"] == "function_call_output":
        output: Any = _content(item["output"], where)
        if isinstance(output, list) and all(part["type"] == "text" for part in output):
            output = "\n".join(part["text"] for part in output)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    return {"role": item["role"], "content": _content(item["content"], where)}
