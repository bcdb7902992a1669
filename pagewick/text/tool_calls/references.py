"""References of a schema that is cut out of another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Where schemas keep the schemas to which $ref refers.
_DEFINITIONS = ("$defs", "definitions")
# The copy of a whole schema has the definitions beside it.
_ONLY_AT_TOP = (*_DEFINITIONS, "$id", "$schema")
_WHOLE = "whole"


def with_root(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the schema `root` as a schema of its own, with all that it refers to."""
    if not _has_reference(schema, _is_any):
        return dict(schema)
    definitions = {key: root[key] for key in _DEFINITIONS if isinstance(root.get(key), Mapping)}
    alone = {**definitions, **schema}
    if not _has_reference(alone, _is_elsewhere):
        return alone
    beside = alone["$defs"] if isinstance(alone.get("$defs"), Mapping) else {}
    name = _WHOLE
    while name in beside:
        name += "_"
    whole = {key: value for key, value in root.items() if key not in _ONLY_AT_TOP}
    found: dict[str, Any] = _moved({**alone, "$defs": {**beside, name: whole}}, f"#/$defs/{name}")
    return found


def _is_elsewhere(key: str, value: Any) -> bool:
    if key != "$ref" or not isinstance(value, str):
        return False
    return value == "#" or (value.startswith("#/") and not value.startswith(tuple(f"#/{one}/" for one in _DEFINITIONS)))


def _is_any(key: str, value: Any) -> bool:
    return key == "$ref"


def _has_reference(value: Any, is_one: Callable[[str, Any], bool]) -> bool:
    if isinstance(value, Mapping):
        return any(is_one(key, one) or _has_reference(one, is_one) for key, one in value.items())
    return isinstance(value, list) and any(_has_reference(one, is_one) for one in value)


def _moved(value: Any, place: str) -> Any:
    """Return a value with `place` before the targets of references that are no definitions."""
    if isinstance(value, Mapping):
        return {key: place + one[1:] if _is_elsewhere(key, one) else _moved(one, place) for key, one in value.items()}
    return [_moved(one, place) for one in value] if isinstance(value, list) else value
