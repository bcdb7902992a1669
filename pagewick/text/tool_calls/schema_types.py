"""The types that a JSON schema allows for a value, as formats need them that write values without quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that the schema allows; all if it does not tell. root: the schema to which $ref refers."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ALL
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_found(reference, root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(type_of, values))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(keyword), list):
            return frozenset[str]().union(*(types_of(one, root, depth + 1) for one in branches))
    return _ALL


def type_of(value: Any) -> str:
    """Return the JSON type of a value; a whole number is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the value of a text without quotes as JSON: a string, unless it is JSON of another allowed type."""
    written = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        kind = type_of(json.loads(written, parse_constant=refuse_constant))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_allowed = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return written if is_allowed and kind != "string" else json.dumps(text, ensure_ascii=False)


def refuse_constant(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def _found(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
