"""Checks of a JSON schema that llguidance does not make.

llguidance itself refuses most keywords that it does not support. The ones below it would ignore.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagewick.text.grammars.limits import GrammarLimits, cannot

# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords of draft 3, and their successors.
_OLD = {"divisibleBy": "multipleOf", "disallow": "not", "extends": "allOf"}
# Drafts in which `items` may be a list, by a part of their addresses.
_DRAFTS_WITH_TUPLES = ("draft-04", "draft-06", "draft-07", "2019-09")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Numbers beyond these are not exact in llguidance.
_EXACT = 2**53
# Formats of OpenAPI: the ranges of their integers, and those that allow any value of the type.
_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_ANY_VALUE = ("float", "double", "password")


def prepared_schema(schema: Any, limits: GrammarLimits, *, closes_objects: bool = False) -> Any:
    """Return a schema as llguidance is to read it.

    closes_objects: objects have only the properties that the schema names. Raises InvalidRequestError for a schema that
    is no schema, beyond the limits, or has a keyword that would not be honoured exactly.
    """
    if not isinstance(schema, dict | bool):
        raise cannot("a JSON schema must be an object, true or false")
    limits.check_depth(schema)
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise cannot(f"the JSON schema is not JSON: {error}") from None
    if size > limits.max_size:
        raise cannot(f"the JSON schema has {size} bytes, more than the limit of {limits.max_size} (--max-grammar-size)")
    if isinstance(schema, bool):
        return schema
    draft = str(schema.get("$schema", ""))
    has_tuples = any(one in draft for one in _DRAFTS_WITH_TUPLES)
    return _prepared(schema, "", has_tuples=has_tuples, closes_objects=closes_objects)


def _prepared(schema: dict[str, Any], path: str, *, has_tuples: bool, closes_objects: bool) -> dict[str, Any]:
    _check_keywords(schema, path, has_tuples=has_tuples)
    made = dict(schema)
    for name, key, inner in list(_subschemas(schema)):
        place = f"{path}.{name}" if key is None else f"{path}.{name}.{key}"
        if not isinstance(inner, dict):
            continue
        new = _prepared(inner, place, has_tuples=has_tuples, closes_objects=closes_objects)
        if key is None:
            made[name] = new
        else:
            if made[name] is schema[name]:
                made[name] = schema[name].copy()
            made[name][key] = new
    if closes_objects and ("properties" in made or made.get("type") == "object"):
        made.setdefault("additionalProperties", False)
    return _without_format(made)


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (keyword, key, schema); the key is None for a keyword whose value is a schema."""
    for name in schema.keys() & {*_ONE, *_LISTS, *_MAPS}:
        value = schema[name]
        if name in _MAPS and isinstance(value, dict):
            yield from ((name, key, inner) for key, inner in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from ((name, place, inner) for place, inner in enumerate(value))
        elif name in _ONE:
            yield name, None, value


def _check_keywords(schema: dict[str, Any], path: str, *, has_tuples: bool) -> None:
    where = f"at {path.lstrip('.')[:200]}" if path else "at the top"
    for name, successor in _OLD.items():
        if name in schema:
            raise cannot(f"the keyword {name} {where} is of an old draft; use {successor}")
    for name in ("$ref", "$id"):
        value = schema.get(name)
        if path and name == "$id" and value is not None:
            raise cannot(f"the keyword $id {where} is not supported inside a schema; leave it out")
        if name == "$ref" and isinstance(value, str) and not value.startswith("#"):
            message = (
                f"the keyword $ref {where} refers to {value[:80]!r}; only references into the schema itself (#...)"
            )
            raise cannot(f"{message} are supported")
    if isinstance(schema.get("items"), list) and not has_tuples:
        raise cannot(f"the keyword items {where} is a list; use prefixItems, or name an older draft in $schema")
    for name in _NUMBERS:
        value = schema.get(name)
        if isinstance(value, bool) and name.startswith("exclusive"):
            raise cannot(f"the keyword {name} {where} must be a number, as it is since draft 6")
        if isinstance(value, int | float) and abs(value) > _EXACT:
            raise cannot(f"the keyword {name} {where} has a number beyond 2**53, which is not supported")


def _without_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Express the formats of OpenAPI by other keywords, or drop those that allow any value."""
    name = schema.get("format")
    if name in _ANY_VALUE:
        del schema["format"]
    return schema
