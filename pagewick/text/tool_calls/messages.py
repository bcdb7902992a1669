"""Messages with calls and results: their checks, and one form for all that clients send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError
from pagewick.text.tool_calls.splitter import PromptId

Message = Mapping[str, Any]


def has_calls(messages: Iterable[Message]) -> bool:
    """Return whether any message has calls, or a call's result."""
    fields = ("tool_calls", "function_call")
    return any(one.get("role") in ("tool", "function") or any(map(one.get, fields)) for one in messages)


def with_checked_calls(messages: Sequence[Message], prompt_id: PromptId) -> list[dict[str, Any]]:
    """Return the messages with calls and results in one form: tool_calls, and the role tool with id and name.

    prompt_id: makes the ids that the chat template accepts. Results without any call before them stay as they are, as
    clients send them when a conversation was cut off. Raises InvalidRequestError for calls and results that do not
    belong together.
    """
    joined: list[dict[str, Any]] = []
    seen: dict[str, str] = {}  # the ids of all calls so far, with their names
    open_ids: dict[str, str] = {}  # the ids of the latest calls that have no result yet -> the ids in the prompt
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if message.get("role") in ("tool", "function"):
            joined.append(_result(message, where, seen, open_ids))
            continue
        open_ids = {}
        plain = dict(message)
        calls = plain.pop("tool_calls", None) or []
        if legacy := plain.pop("function_call", None):
            calls = [*calls, {"id": f"call_{place}", "type": "function", "function": legacy}]
        if calls:
            plain["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{index}]", seen, open_ids, prompt_id)
                for index, call in enumerate(calls)
            ]
        joined.append(plain)
    return joined


def _call(call: Any, where: str, seen: dict[str, str], open_ids: dict[str, str], prompt_id: PromptId) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where} must have a function with a name and arguments", param=where)
    name, arguments = function.get("name"), function.get("arguments", "{}")
    call_id = call.get("id") or f"call_{len(seen)}"
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name must be the tool's name", param=f"{where}.function.name")
    if not isinstance(arguments, str | Mapping):
        message = f"{where}.function.arguments must be a string of JSON"
        raise InvalidRequestError(message, param=f"{where}.function.arguments")
    if not isinstance(call_id, str):
        raise InvalidRequestError(f"{where}.id must be a string", param=f"{where}.id")
    if call_id in open_ids:
        message = f"{where}.id {call_id[:80]!r} is also the id of another call in this message"
        raise InvalidRequestError(message, param=f"{where}.id")
    open_ids[call_id] = prompt_id(call_id, name, len(seen))
    seen[call_id] = name
    given = {"name": name, "arguments": arguments if arguments != "" else "{}"}
    return {"type": "function", **call, "id": open_ids[call_id], "function": given}


def _result(message: Message, where: str, seen: dict[str, str], open_ids: dict[str, str]) -> dict[str, Any]:
    """Return a result with the id and the name of its call, which it closes."""
    result = {**message, "role": "tool"}
    if not seen:
        return result
    call_id = message.get("tool_call_id")
    if call_id is None:
        names = [one for one in open_ids if message.get("name") in (None, seen[one])]
        call_id = names[0] if names and (len(names) == 1 or message.get("role") == "function") else None
        if call_id is None:
            text = f"{where}.tool_call_id must be the id of the call that it answers"
            raise InvalidRequestError(text, param=f"{where}.tool_call_id")
    if call_id not in open_ids:
        raise InvalidRequestError(
            f"{where}.tool_call_id {str(call_id)[:80]!r} {_why_wrong(call_id, seen, open_ids)}",
            param=f"{where}.tool_call_id",
        )
    result["tool_call_id"] = open_ids.pop(call_id)
    result.setdefault("name", seen[call_id])
    return result


def _why_wrong(call_id: Any, seen: Mapping[str, str], open_ids: Mapping[str, str]) -> str:
    if call_id in seen:
        return "must directly follow the message with its call, and answer it once"
    known = ", ".join(map(repr, open_ids)) or "none"
    return f"is not the id of a call before it; calls without a result: {known[:200]}"
