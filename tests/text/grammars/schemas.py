"""Schemas of all keyword families, each small enough that a model which writes at random soon ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        **more,
    }


def scalars() -> Iterator[Any]:
    yield from ({"type": kind} for kind in ("boolean", "null"))
    yield from ({"const": value} for value in (1, 1.5, 'é"\\', None, True, [1, {"a": []}], {"a": {"b": [None]}}))
    yield from (
        {"enum": values} for values in ([1, 2, 3], ["a", "b/c"], [None, "x", 2.5], [{"k": 1}, [2]], ["\n", "\t"])
    )
    for low, high in ((0, 9), (-5, 5), (100, 120), (-1000, -990), (7, 7), (0, 1)):
        yield {"type": "integer", "minimum": low, "maximum": high}
        yield {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    for factor in (2, 3, 5, 7, 10, 25):
        yield {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": factor}
    for low, high in ((0, 1), (-2.5, 2.5), (1.25, 1.75), (99.5, 100)):
        yield {"type": "number", "minimum": low, "maximum": high}
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"type": ["integer", "null"], "minimum": 0, "maximum": 3}
    yield {"type": ["string", "boolean"], "maxLength": 3}


def strings() -> Iterator[Any]:
    for low, high in ((0, 0), (0, 1), (1, 4), (3, 3), (2, 8)):
        yield {"type": "string", "minLength": low, "maxLength": high}
    for pattern in (
        "^[a-z]{3}$", "^a", "b$", "c", "^(foo|bar)+$", "^\\d{2,4}$", "^[^x]{1,3}$", "^\\w+@\\w+\\.de$", "^a?b*c+$",
        "^[A-Z][a-z]{0,5}$", "^(x|yz){2}$", "^\\s?$", "^.{2}$", "^[\\u00e0-\\u00ff]{2}$", "^\\\\?\"?$",
    ):  # fmt: skip
        yield {"type": "string", "pattern": pattern, "maxLength": 24}
    for name in ("date-time", "date", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri"):
        yield {"type": "string", "format": name}


def arrays() -> Iterator[Any]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    for low, high in ((0, 0), (0, 2), (1, 1), (2, 4), (3, 3)):
        yield {"type": "array", "items": digit, "minItems": low, "maxItems": high}
    yield {"type": "array", "prefixItems": [digit, {"type": "boolean"}], "items": False}
    yield {"type": "array", "prefixItems": [digit, {"type": "boolean"}], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [{"const": "a"}], "items": digit, "maxItems": 3, "minItems": 1}
    yield {"type": "array", "items": {"type": "array", "items": digit, "maxItems": 2}, "maxItems": 2}
    yield {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}
    yield {"type": "array", "items": {"anyOf": [digit, {"type": "null"}]}, "maxItems": 3}
    draft7 = "http://json-schema.org/draft-07/schema#"
    yield {"$schema": draft7, "type": "array", "items": [digit, {"type": "null"}], "additionalItems": False}
    yield {"$schema": draft7, "type": "array", "items": [digit], "additionalItems": {"const": 1}, "maxItems": 3}


def objects() -> Iterator[Any]:
    bit, word = {"type": "boolean"}, {"enum": ["red", "green"]}
    yield _object({})
    yield _object({"a": bit})
    yield _object({"a": bit, "b": word, "c": {"type": "null"}})
    yield _object({"a b": bit, '"': word, "é": bit})
    for size in range(4):
        optional = _object(dict.fromkeys("abc", bit))
        yield {**optional, "required": ["a", "b", "c"][:size]}
    yield {"type": "object", "additionalProperties": bit, "maxProperties": 0}
    yield _object({"a": bit}, additionalProperties=False, minProperties=1)
    yield _object({"a": _object({"b": _object({"c": word})})})
    yield {"type": "object", "patternProperties": {"^x[ab]$": bit}, "additionalProperties": False, "maxProperties": 0}
    yield {"type": "object", "required": ["z"], "properties": {"z": word}, "additionalProperties": False}


def combined() -> Iterator[Any]:
    small, word = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 2}
    yield {"anyOf": [small, word]}
    yield {"oneOf": [small, word, {"type": "null"}]}
    yield {"oneOf": [_object({"kind": {"const": kind}, kind: small}) for kind in ("a", "b", "c")]}
    yield {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}
    yield {"allOf": [_object({"a": small}), {"properties": {"a": {"minimum": 4}}}]}
    yield {"$ref": "#/$defs/n", "$defs": {"n": small}}
    yield {"$ref": "#/definitions/n", "definitions": {"n": word}}
    yield {"$defs": {"n": small}, **_object({"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}})}
    yield {"$defs": {"n": small}, "$ref": "#/$defs/n", "minimum": 5}
    tree = _object({"v": small, "t": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}})
    yield {"$defs": {"t": tree}, "$ref": "#/$defs/t"}
    yield {
        "title": "t",
        "description": "d",
        "default": 1,
        "examples": [2],
        "$comment": "c",
        "deprecated": True,
        **small,
    }
    yield {"type": "string", "enum": ["aa", "bb"], "pattern": "^a"}
    yield {"type": "integer", "enum": [1, 2, "x"]}


def nested() -> Iterator[Any]:
    """Every pair of families: a property, an element and an alternative of each of the others."""
    parts = [*itertools.islice(scalars(), 2, None, 3), *itertools.islice(strings(), 0, None, 3)]
    for first, second in itertools.pairwise(parts):
        yield _object({"one": first, "two": second})
        yield {"type": "array", "items": {"anyOf": [first, second]}, "minItems": 1, "maxItems": 2}
        yield _object({"list": {"type": "array", "prefixItems": [first, second], "items": False, "minItems": 2}})
        yield {"type": "object", "properties": {"one": first, "two": second}, "required": ["two"],
               "additionalProperties": False}  # fmt: skip


SCHEMAS = [*scalars(), *strings(), *arrays(), *objects(), *combined(), *nested()]
