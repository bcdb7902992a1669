"""The tools of a request: functions, alone or in namespaces, which become functions with longer names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.server.api.tool_fields import FunctionTool, Tool, tools_of


class ResponsesFunction(Struct, kw_only=True):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    type: str
    name: str | UnsetType = UNSET
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as a response repeats it."""
        return {"description": None, "parameters": None, "strict": None, **msgspec.to_builtins(self)}


class ResponsesTool(ResponsesFunction, kw_only=True):
    """A function, or a namespace with functions. tools: those of a namespace."""

    tools: list[ResponsesFunction] | None = None

    def plain(self) -> dict[str, Any]:
        if self.type == "namespace":
            functions = [one.plain() for one in self.tools or ()]
            return {"type": self.type, "name": self.name, "description": self.description, "tools": functions}
        return {name: value for name, value in super().plain().items() if name != "tools"}


@dataclass
class Offer:
    """tools: in the form of chats. namespaces: from the name of such a tool to its namespace and its name there.

    names: from the places of tools to those of the request; see TextRequest.names.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=lambda: {"tools[].function": "tools[]"})


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


def offer_of(tools: Sequence[ResponsesTool]) -> Offer:
    """Raises InvalidRequestError, and UnsupportedError for tools that are no functions."""
    offer = Offer()
    found: list[Tool] = []
    for function, where, namespace, about in _functions(tools):
        if function.type != "function":
            message = f"{where}.type {function.type[:64]!r} is not supported; only functions are"
            raise UnsupportedError(message, param=f"{where}.type")
        name = _name(function, where)
        offer.names[f"tools[{len(found)}].function"] = where
        if namespace is not None:
            offer.namespaces[full_name(namespace, name)] = (namespace, name)
        about = "\n\n".join(text for text in (about, function.description) if text)
        made = FunctionTool(
            name=full_name(namespace, name),
            description=about or None,
            parameters=function.parameters,
            strict=function.strict,
        )
        found.append(Tool(function=made))
    offer.tools = tools_of(found, None)
    return offer


def _functions(tools: Sequence[ResponsesTool]) -> Iterator[tuple[ResponsesFunction, str, str | None, str | None]]:
    """Yield functions, each with its place and its namespace. The first of a namespace has what that says of itself."""
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if tool.type != "namespace":
            yield tool, where, None, None
            continue
        for inner, function in enumerate(tool.tools or ()):
            about = tool.description if inner == 0 else None
            yield function, f"{where}.tools[{inner}]", _name(tool, where), about


def _name(tool: ResponsesFunction, where: str) -> str:
    if isinstance(tool.name, UnsetType):
        message = f"{where}.name is missing; it stands beside the type"
        raise InvalidRequestError(message, param=f"{where}.name")
    return tool.name


def choice_as_in_chats(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a choice in the nested form that chats have. Raises InvalidRequestError, UnsupportedError."""
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name), **rest}:
            return _function_as_in_chats(name, rest)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            allowed = list(map(_allowed_as_in_chats, tools))
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            message = f"tool_choice of type {kind[:64]!r} is not supported; only functions are"
            raise UnsupportedError(message, param="tool_choice")
    message = (
        'tool_choice must be "none", "auto", "required", {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    )
    raise InvalidRequestError(message, param="tool_choice")


def _function_as_in_chats(name: str, rest: Mapping[Any, Any]) -> dict[str, Any]:
    namespace = rest.get("namespace")
    return {"type": "function", "function": {"name": full_name(namespace and str(namespace), name)}}


def _allowed_as_in_chats(tool: Any) -> Any:
    match tool:
        case {"type": "function", "name": str(name), **rest}:
            return _function_as_in_chats(name, rest)
    return tool
