"""Tools in forms that more chat templates know than that of the request, and that say the same to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Keywords whose values are schemas by name, and those whose values are schemas or lists of them.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_NESTED = frozenset({
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "propertyNames",
    "unevaluatedProperties", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
})  # fmt: skip


def complete_tools(tools: Sequence[Any]) -> list[Any]:
    """Return the tools, in OpenAI's form, with the fields that clients may leave out: descriptions and parameters."""

    def complete(function: Mapping[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping) or not {"type", "properties"} <= parameters.keys():
            parameters = {"type": "object", "properties": {}, **(parameters or {})}
        return {**function, "description": function.get("description") or "", "parameters": parameters}

    return _with_functions(tools, complete)


def tools_without_null(tools: Sequence[Any]) -> list[Any]:
    """Return the tools, in OpenAI's form, with parameters as `schema_without_null` writes them."""

    def without_null(function: Mapping[str, Any]) -> dict[str, Any]:
        return {key: schema_without_null(one) if key == "parameters" else one for key, one in function.items()}

    return _with_functions(tools, without_null)


def schema_without_null(schema: Any) -> Any:
    """Return a schema without the type null, for which it has OpenAPI's word: {"type": "string", "nullable": true}."""
    if not isinstance(schema, Mapping):
        return [schema_without_null(one) for one in schema] if isinstance(schema, list) else schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: schema_without_null(one) for name, one in value.items()}
        else:
            found[key] = schema_without_null(value) if key in _NESTED else value
    kind = found.get("type")
    if kind in ("null", ["null"]):
        del found["type"]
        found["enum"] = [None]
    elif isinstance(kind, list) and "null" in kind:
        kinds = [one for one in kind if one != "null"]
        found |= {"type": kinds[0] if len(kinds) == 1 else kinds, "nullable": True}
    return found


def _with_functions(tools: Sequence[Any], form: Callable[[Mapping[str, Any]], dict[str, Any]]) -> list[Any]:
    def formed(tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        return {**tool, "function": form(function)} if isinstance(function, Mapping) else tool

    return [formed(tool) for tool in tools]
