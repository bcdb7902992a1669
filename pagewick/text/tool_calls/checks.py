"""Checks of the tools that a request offers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError
from pagewick.text.tool_calls.offer import ToolChoice, ToolOffer

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def checked_offer(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None = None) -> ToolOffer | None:
    """Return the tools that a response may call; None if there are none. Raises InvalidRequestError."""
    choice = choice or ToolChoice()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must have at most {MAX_TOOLS} entries; got {len(tools)}", param="tools")
    names = [_checked_name(tool, f"tools[{place}].function") for place, tool in enumerate(tools)]
    for place, name in enumerate(names):
        if name in names[:place]:
            where = f"tools[{place}].function.name"
            raise InvalidRequestError(f"{where} {name!r} is the name of another tool, too", param=where)
    if not tools and (choice.mode == "required" or choice.names is not None):
        raise InvalidRequestError("tool_choice needs tools; add them or leave it out", param="tool_choice")
    if unknown := [name for name in choice.names or () if name not in names]:
        message = f"tool_choice names {unknown[0][:80]!r}, which is not one of the tools: {', '.join(names)[:300]}"
        raise InvalidRequestError(message, param="tool_choice")
    return ToolOffer.of(tools, choice)


def _checked_name(tool: Mapping[str, Any], where: str) -> str:
    """Check one tool; return its name."""
    # The server's requests have objects; callers in Python may pass anything.
    if not isinstance(tool, Mapping):
        place = where.removesuffix(".function")
        raise InvalidRequestError(f"{place} must be an object with a function; got {str(tool)[:80]!r}", param=place)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where} must be an object with a name", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where}.name must be 1 to 128 letters, digits and characters of _ - . ; got {str(name)[:80]!r}"
        raise InvalidRequestError(message, param=f"{where}.name")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.parameters")
    return name


def _check_schema(schema: Any, where: str) -> None:
    """Check that a schema describes an object; its grammar shows whether the rest of it is right."""
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{where} must be a JSON schema, an object", param=where)
    if schema.get("type", "object") != "object":
        message = f"{where}.type must be 'object', since arguments have names; got {str(schema['type'])[:80]!r}"
        raise InvalidRequestError(message, param=f"{where}.type")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not all(isinstance(one, Mapping | bool) for one in properties.values()):
        message = f"{where}.properties must have a JSON schema for each name"
        raise InvalidRequestError(message, param=f"{where}.properties")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidRequestError(f"{where}.required must be a list of names", param=f"{where}.required")
    kinds = {"string", "number", "integer", "boolean", "null", "array", "object"}
    for key, one in properties.items():
        kind = one.get("type") if isinstance(one, Mapping) else None
        found = kind if isinstance(kind, list) else [kind]
        if kind is not None and not all(isinstance(one, str) and one in kinds for one in found):
            place = f"{where}.properties.{key}.type"
            message = f"{place} must be one of {', '.join(sorted(kinds))}; got {str(kind)[:80]!r}"
            raise InvalidRequestError(message, param=place)
