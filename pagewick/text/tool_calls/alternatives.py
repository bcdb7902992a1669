"""The alternatives of a JSON schema: schemas without $ref, anyOf, oneOf and allOf, one of which a value must fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_DEPTH = 8
# Schemas that are read or merged: references could multiply them without a limit.
_MAX_SCHEMAS = 1024
_COMBINING = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
# Keywords of which one is as good as another if two schemas apply to the same value.
_NOTES = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples",
    "readOnly", "title", "writeOnly",
})  # fmt: skip


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return schemas of which a value must fit at least one; there is always one.

    root: the schema to which $ref refers. An alternative keeps a $ref that refers to nothing, and has an allOf for what
    could not be merged into it.
    """
    return _Resolver(root).alternatives(schema, 0)


def types_within(alternative: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that an alternative allows; all if it does not tell."""
    choices = choices_of(alternative)
    return frozenset(map(type_of, choices)) if choices else _declared(alternative)


def choices_of(alternative: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that an alternative lists, as far as it allows their types; None if it lists none."""
    values = [alternative["const"]] if "const" in alternative else alternative.get("enum")
    if not isinstance(values, list):
        return None
    declared = _with_integers(_declared(alternative))
    return [one for one in values if type_of(one) in declared]


def strings_and_others(schema: Any, root: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schemas of the strings and of the other values that fit a schema; empty if none do."""
    strings: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for one in alternatives(schema, root):
        choices, types = choices_of(one), types_within(one)
        if choices is not None:
            chosen = [value for value in choices if isinstance(value, str)]
            strings += [{"enum": chosen}] * bool(chosen)
            others += [{"enum": [value for value in choices if not isinstance(value, str)]}] * (chosen != choices)
            continue
        strings += [{**one, "type": "string"}] * ("string" in types)
        kept = sorted(types - {"string", "integer"} if "number" in types else types - {"string"})
        others += [{**one, "type": kept}] * bool(kept)
    return any_of(strings), any_of(others)


def any_of(schemas: Sequence[Any]) -> Any:
    """Return the schema of values that fit one of these; empty if there are none."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": [*schemas]} if schemas else {}


def properties_of(alternative: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's properties by their names."""
    found = alternative.get("properties")
    return found if isinstance(found, Mapping) else {}


def merged_properties(forms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schemas of the properties that any of these schemas of objects has or requires."""
    if len(forms) == 1:
        found = dict(properties_of(forms[0]))
    else:
        ways: dict[str, dict[str, Any]] = {}
        for form in forms:
            for key, schema in properties_of(form).items():
                ways.setdefault(key, {})[json.dumps(schema, sort_keys=True)] = schema
        found = {key: any_of([*schemas.values()]) for key, schemas in ways.items()}
    # Any value will do for a property that is required but has no schema.
    return found | {key: {} for form in forms for key in required_of(form) if key not in found}


def required_of(alternative: Mapping[str, Any]) -> list[str]:
    """Return the names of the properties that an object must have."""
    found = alternative.get("required")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


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


class _Resolver:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_SCHEMAS

    def alternatives(self, schema: Any, depth: int) -> list[Mapping[str, Any]]:
        if not isinstance(schema, Mapping):
            return [{}]
        self._num_left -= 1
        if not _COMBINING & schema.keys():
            return [schema]
        if depth > _MAX_DEPTH or self._num_left < 0:
            return [{"allOf": [schema]}]
        own, groups = self._divided(schema)
        found: list[Mapping[str, Any]] = [own]
        for group in groups:
            inner = [one for branch in group for one in self.alternatives(branch, depth + 1)]
            self._num_left -= len(found) * len(inner)
            if self._num_left < 0:
                return [{"allOf": [schema]}]
            merged = [_both(one, other) for one in found for other in inner]
            found = [one for one in merged if one is not None] or found
        return found

    def _divided(self, schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Sequence[Any]]]:
        """Return a schema's own keywords, and lists of schemas: a value must fit at least one of each list."""
        own = {key: value for key, value in schema.items() if key not in _COMBINING}
        groups: list[Sequence[Any]] = []
        if isinstance(reference := schema.get("$ref"), str):
            target = _target(reference, self._root)
            if target is None:
                own["$ref"] = reference
            else:
                groups.append([target])
        if isinstance(parts := schema.get("allOf"), list):
            groups += [[part] for part in parts]
        groups += [found for key in ("anyOf", "oneOf") if isinstance(found := schema.get(key), list) and found]
        return own, groups


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema at a JSON pointer; None if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: Any = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and len(key) < 6 and key.isdecimal():
            found = next(iter(found[int(key) : int(key) + 1]), None)
        else:
            return None
    return found


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of what fits two schemas; None if no type does."""
    types = _with_integers(types_within(one)) & _with_integers(types_within(other))
    if not types:
        return None
    both = {**one, **other}
    if "type" in both:
        kept = sorted(types - {"integer"} if "number" in types else types)
        both["type"] = kept[0] if len(kept) == 1 else kept
    left = {}
    for key in (one.keys() & other.keys()) - _NOTES - {"type"}:
        first, second = one[key], other[key]
        if first == second:
            continue
        if key == "properties" and isinstance(first, Mapping) and isinstance(second, Mapping):
            shared = {name: {"allOf": [*_parts(first[name]), second[name]]} for name in first if name in second}
            both[key] = {**first, **second, **shared}
        elif key in ("required", "allOf") and isinstance(first, list) and isinstance(second, list):
            both[key] = [*first, *second]
        else:
            left[key] = first
    if left:
        both["allOf"] = [*both.get("allOf", ()), left]
    return both


def _parts(schema: Any) -> list[Any]:
    """Return the schemas of which a schema consists. They stay in one list, so that no depth grows."""
    is_list = isinstance(schema, Mapping) and schema.keys() == {"allOf"} and isinstance(schema["allOf"], list)
    return schema["allOf"] if is_list else [schema]


def _declared(alternative: Mapping[str, Any]) -> frozenset[str]:
    kind = alternative.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    return _ALL


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types
