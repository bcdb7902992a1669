"""Prepares a JSON schema for llguidance: refuses what llguidance would ignore, or not keep exactly.

llguidance itself refuses most keywords that it does not support.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pagewick.text.grammars.exact_keywords import BOUNDS, inexact_keywords, rewrite_keywords
from pagewick.text.grammars.limits import GrammarLimits, cannot

# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords of draft 3, and their successors.
_OLD = {"divisibleBy": "multipleOf", "disallow": "not", "extends": "allOf"}
# Drafts in which `items` may be a list, by a part of their addresses.
_DRAFTS_WITH_TUPLES = ("draft-04", "draft-06", "draft-07", "2019-09")


def prepared_schema(
    schema: Any, limits: GrammarLimits, *, closes_objects: bool = False, is_lenient: bool = False
) -> Any:
    """Return a schema as llguidance is to read it.

    closes_objects: objects have only the properties that the schema names. is_lenient: leave out what would not be
    honoured exactly. Raises InvalidRequestError for a schema that is no schema, beyond the limits, or, unless
    is_lenient, has a keyword that would not be honoured exactly.
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

    def prepared(schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        inexact = [*inexact_keywords(schema)]
        if not is_lenient:
            _check_keywords(schema, path, inexact, has_tuples=has_tuples)
        made = {name: _inner(name, value, prepared, path) for name, value in schema.items() if name not in inexact}
        if closes_objects and ("properties" in made or made.get("type") == "object"):
            made.setdefault("additionalProperties", False)
        rewrite_keywords(made)
        return made

    return prepared(schema, "")


def _inner(name: str, value: Any, prepare: Callable[[Any, str], Any], path: str) -> Any:
    """Return the value of a keyword with the schemas in it prepared. path: the schema's, for errors."""
    if name in _MAPS and isinstance(value, dict):
        return {key: prepare(inner, f"{path}.{name}.{key}") for key, inner in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [prepare(inner, f"{path}.{name}.{place}") for place, inner in enumerate(value)]
    return prepare(value, f"{path}.{name}") if name in _ONE else value


def _check_keywords(schema: dict[str, Any], path: str, inexact: Sequence[str], *, has_tuples: bool) -> None:
    where = f"at {path.lstrip('.')[:200]}" if path else "at the top"
    for name, successor in _OLD.items():
        if name in schema:
            raise cannot(f"the keyword {name} {where} is of an old draft; use {successor}")
    if path and schema.get("$id") is not None:
        raise cannot(f"the keyword $id {where} is not supported inside a schema; leave it out")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        message = f"the keyword $ref {where} refers to {reference[:80]!r}"
        raise cannot(f"{message}; only references into the schema itself (#...) are supported")
    if isinstance(schema.get("items"), list) and not has_tuples:
        raise cannot(f"the keyword items {where} is a list; use prefixItems, or name an older draft in $schema")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(name), bool):
            raise cannot(f"the keyword {name} {where} must be a number, as it is since draft 6")
    if inexact:
        limit = "beyond 2**53" if inexact[0] in BOUNDS else "beyond 2**53, or of more than 15 digits"
        raise cannot(f"the keyword {inexact[0]} {where} has a number {limit}; use smaller or shorter ones, or texts")
    _check_number_of_properties(schema, where)


def _check_number_of_properties(schema: dict[str, Any], where: str) -> None:
    """Raise InvalidRequestError if a response must make up several names: it could repeat one of them."""
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    is_free = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if is_free and isinstance(least, int) and isinstance(required, list) and least > len(required) + 1:
        message = f"the keyword minProperties {where} asks for {least} properties, of which required names"
        raise cannot(f"{message} {len(required)}; only one more is supported, so name more of them, or ask for fewer")
