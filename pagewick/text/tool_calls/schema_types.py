"""The types that a JSON schema allows for a value, as formats need them that write values without quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagewick.text.tool_calls.alternatives import alternatives, type_of, types_within

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the schema allows; all if it does not tell. root: the schema to which $ref refers."""
    return frozenset[str]().union(*map(types_within, alternatives(schema, root)))


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
