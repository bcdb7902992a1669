"""The fields about tools, in OpenAI's present and former form, as the core takes them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.text.tool_calls.offer import ToolChoice

_FORMS = (
    'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call. parameters: a JSON schema of its arguments; none if it is left out."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return plain data for the chat template, in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class Tool(Struct, kw_only=True):
    """type: only functions are supported."""

    type: str = "function"
    function: FunctionTool | UnsetType = UNSET


class NamedFunction(Struct):
    name: str


def tools_of(tools: list[Tool] | None, functions: list[FunctionTool] | None) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's present form. Raises InvalidRequestError, UnsupportedError for other kinds."""
    if tools and functions:
        raise InvalidRequestError("functions is the former name of tools; give one of them", param="functions")
    found = []
    for place, tool in enumerate(tools or ()):
        if tool.type != "function":
            message = f"tools[{place}].type {tool.type[:64]!r} is not supported; only functions are"
            raise UnsupportedError(message, param=f"tools[{place}].type")
        if isinstance(tool.function, UnsetType):
            where = f"tools[{place}].function"
            raise InvalidRequestError(f"{where} must be an object with a name", param=where)
        found.append(tool.function.plain())
    return found + [function.plain() for function in functions or ()]


def choice_of(
    tool_choice: str | dict[str, Any] | None,
    function_call: Literal["none", "auto"] | NamedFunction | None,
    *,
    is_parallel: bool | None,
    is_legacy: bool,
) -> ToolChoice:
    """Return the choice under either name. is_legacy: there is one call at most. Raises InvalidRequestError."""
    parallel = is_parallel is not False and not is_legacy
    if function_call is not None:
        if tool_choice is not None:
            message = "function_call is the former name of tool_choice; give one of them"
            raise InvalidRequestError(message, param="function_call")
        if isinstance(function_call, NamedFunction):
            return ToolChoice("required", (function_call.name,), is_parallel=False)
        return ToolChoice(function_call, is_parallel=parallel)
    match tool_choice:
        case None:
            return ToolChoice(is_parallel=parallel)
        case "none" | "auto" | "required":
            return ToolChoice(tool_choice, is_parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", (name,), is_parallel=False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            if not allowed:
                message = "tool_choice.allowed_tools.tools is empty; name a tool, or give tool_choice none"
                raise InvalidRequestError(message, param="tool_choice")
            return ToolChoice(mode, tuple(map(_allowed_name, allowed)), parallel)
        case {"type": "custom"}:
            raise UnsupportedError(
                "tool_choice of type 'custom' is not supported; only functions are", param="tool_choice"
            )
    raise InvalidRequestError(_FORMS, param="tool_choice")


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequestError(_FORMS, param="tool_choice")
