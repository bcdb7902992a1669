"""Checks messages with calls and results, and brings all forms that clients send into one."""

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
    belong together, and for a result without the id that its call has.
    """
    joined: list[dict[str, Any]] = []
    calls = _Calls(prompt_id)
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if message.get("role") in ("tool", "function"):
            joined.append(calls.close(message, where))
            continue
        calls.open_ids.clear()
        plain = dict(message)
        made = plain.pop("tool_calls", None) or []
        if legacy := plain.pop("function_call", None):
            made = [*made, {"type": "function", "function": legacy}]
        if made:
            plain["tool_calls"] = [calls.add(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(made)]
        joined.append(plain)
    return joined


class _Calls:
    """The calls of a conversation up to a message.

    open_ids: the ids of the latest calls that have no result yet -> the ids in the prompt. Calls that have no id, as
    those of the former form, get one.
    """

    def __init__(self, prompt_id: PromptId) -> None:
        self.open_ids: dict[str, str] = {}
        self._prompt_id = prompt_id
        self._names: dict[str, str] = {}  # the ids of all calls so far, with their names
        self._ids_made_here: set[str] = set()

    def add(self, call: Any, where: str) -> dict[str, Any]:
        """Return a call with an id, and with arguments. where: its place in the request, for errors."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequestError(f"{where} must have a function with a name and arguments", param=where)
        name, arguments = function.get("name"), function.get("arguments", "{}")
        call_id = call.get("id") or f"call_{len(self._names)}"
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"{where}.function.name must be the tool's name", param=f"{where}.function.name")
        if not isinstance(arguments, str | Mapping):
            message = f"{where}.function.arguments must be a string of JSON"
            raise InvalidRequestError(message, param=f"{where}.function.arguments")
        if not isinstance(call_id, str):
            raise InvalidRequestError(f"{where}.id must be a string", param=f"{where}.id")
        if call_id in self.open_ids:
            message = f"{where}.id {call_id[:80]!r} is also the id of another call in this message"
            raise InvalidRequestError(message, param=f"{where}.id")
        self.open_ids[call_id] = self._prompt_id(call_id, name, len(self._names))
        self._names[call_id] = name
        (self._ids_made_here.discard if call.get("id") else self._ids_made_here.add)(call_id)
        given = {"name": name, "arguments": arguments if arguments != "" else "{}"}
        return {"type": "function", **call, "id": self.open_ids[call_id], "function": given}

    def close(self, message: Message, where: str) -> dict[str, Any]:
        """Return a result with the id and the name of its call, which is then no longer open."""
        result = {**message, "role": "tool"}
        call_id = message.get("tool_call_id")
        if call_id is None:
            call_id = self._id_for(message)
            if call_id is None and (self._names or message.get("role") == "tool"):
                text = f"{where}.tool_call_id must be the id of the call that it answers"
                raise InvalidRequestError(text, param=f"{where}.tool_call_id")
        if not self._names:
            return result
        if call_id not in self.open_ids:
            raise InvalidRequestError(
                f"{where}.tool_call_id {str(call_id)[:80]!r} {_why_wrong(call_id, self._names, self.open_ids)}",
                param=f"{where}.tool_call_id",
            )
        result["tool_call_id"] = self.open_ids.pop(call_id)
        result.setdefault("name", self._names[call_id])
        return result

    def _id_for(self, message: Message) -> str | None:
        """Return the id of the first open call that a result without an id may answer, if there is one.

        A result of the role tool may only answer a call that had no id either.
        """
        is_former = message.get("role") == "function"
        for call_id in self.open_ids:
            if message.get("name") in (None, self._names[call_id]) and (is_former or call_id in self._ids_made_here):
                return call_id
        return None


def _why_wrong(call_id: Any, seen: Mapping[str, str], open_ids: Mapping[str, str]) -> str:
    if call_id in seen:
        return "must directly follow the message with its call, and answer it once"
    known = ", ".join(map(repr, open_ids)) or "none"
    return f"is not the id of a call before it; calls without a result: {known[:200]}"
