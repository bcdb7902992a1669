"""Schemas of arguments that are written one by one: several types, references, alternatives."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.text.tool_calls.alternatives import alternatives, types_within
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from tests.text.tool_calls.families import Family, tool
from tests.text.tool_calls.forms import Call
from tests.text.tool_calls.test_formats import read
from tests.text.tool_calls.test_grammars import IN_PYTHON, VOCABULARY, WRITTEN, accepts, each_format, grammar_of

IN_TAGS = ("qwen3_coder", "glm45", "minimax_m2", "seed_oss", "minicpm5")
# Those that tell strings from other values.
WITH_KINDS = ("functiongemma", "gemma4", "deepseek_v32")
# Those whose arrays and objects are no JSON.
OF_THEIR_OWN = ("functiongemma", "minimax_m3")
in_tags = pytest.mark.parametrize("name", IN_TAGS)
without_quotes = pytest.mark.parametrize("name", [*IN_TAGS, "minimax_m3", *WITH_KINDS])
DEFINITIONS = {
    "Name": {"type": ["string", "null"]},
    "Color": {"title": "Color", "type": "string", "enum": ["red", "light blue"]},
    "Code": {"type": "string", "pattern": "^x+$"},
    "Long": {"$ref": "#/$defs/Longer", "maxLength": 8},
    "Longer": {"type": "string", "minLength": 5},
    "Tree": {"type": "object", "properties": {"of": {"$ref": "#/$defs/Trees"}}, "required": ["of"]},
    "Trees": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
}
NOTHING = {"type": "null"}


def with_argument(schema: Any, *, is_strict: bool = False) -> ToolOffer:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}
    return ToolOffer([Tool("f", parameters, is_strict)], is_required=True)


def takes(name: str, schema: Any, value: Any, *, is_strict: bool = False) -> bool:
    """Return whether the grammar allows a value of an argument, which is then read back."""
    offer, calls = with_argument(schema, is_strict=is_strict), [("f", {"a": value})]
    return keeps(WRITTEN[name], offer, calls)


def keeps(family: Family, offer: ToolOffer, calls: list[Call]) -> bool:
    text = family.write(calls)
    if not accepts(family, offer, text):
        return False
    assert read(family, text, offer=offer, is_guided=True).parsed == calls
    return True


@without_quotes
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, NOTHING], "default": None},
        {"type": ["string", "null"]},
        {},
        {"title": "Anything"},
        {"allOf": [{"$ref": "#/$defs/Name"}], "description": "A name."},
        {"oneOf": [NOTHING, {"$ref": "#/$defs/Name"}]},
    ],
)
def test_strings_of_arguments_that_need_not_be_strings(name: str, schema: Any, is_strict: bool) -> None:
    for value in ("Rome", "3 days", "é😀\n\n- x", "", None):
        assert takes(name, schema, value, is_strict=is_strict), value


@without_quotes
def test_other_values_beside_strings_keep_their_types(name: str) -> None:
    for value in ("12 a", 12, -1.5, True, None, [1, ["a", None]]):
        assert takes(name, {}, value)
    schema = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}
    assert takes(name, schema, [1, 2]) and takes(name, schema, "[1")


@without_quotes
@pytest.mark.parametrize("is_strict", [False, True])
def test_choices_behind_references_and_alternatives(name: str, is_strict: bool) -> None:
    color = {"$ref": "#/$defs/Color"}
    for schema, fitting, others in (
        (color, ("red", "light blue"), ("green", "redd", "", None)),
        ({"allOf": [color], "default": "red"}, ("red",), ("green", None)),
        ({"anyOf": [color, NOTHING]}, ("red", None), ("green", 3)),
        ({"anyOf": [color, {"const": "none"}]}, ("light blue", "none"), ("green", None)),
        ({"enum": ["a", 1, None]}, ("a", 1, None), ("b", 2, True)),
        ({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}, ("auto", 1, 20), ("automatic", 0, None)),
    ):
        for value in fitting:
            assert takes(name, schema, value, is_strict=is_strict), (schema, value)
        for value in others:
            assert not takes(name, schema, value, is_strict=is_strict), (schema, value)


@without_quotes
@pytest.mark.parametrize("is_strict", [False, True])
def test_lengths_behind_references_and_alternatives(name: str, is_strict: bool) -> None:
    for schema, fitting, others in (
        ({"$ref": "#/$defs/Long"}, ("Berlin", "12345678"), ("Rome", "Stuttgart", None)),
        ({"anyOf": [{"$ref": "#/$defs/Long"}, NOTHING]}, ("Berlin", None), ("Rome", "Stuttgart", 3)),
        (
            {"anyOf": [{"const": "no"}, {"$ref": "#/$defs/Long"}, {"type": "number"}]},
            ("no", "Berlin", -2.5),
            ("Rome", None),
        ),
    ):
        for value in fitting:
            assert takes(name, schema, value, is_strict=is_strict), (schema, value)
        for value in others:
            assert not takes(name, schema, value, is_strict=is_strict), (schema, value)


@without_quotes
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("name_of_format", "fitting", "others"),
    [
        ("date", ("2026-02-28", "2024-02-29"), ("2026-02-29", "2026-2-1", "today", "2026-02-28 ", "")),
        ("time", ("23:59:59Z",), ("24:00:00Z", "12:00")),
        ("date-time", ("2026-11-28T09:46:47.5+01:00",), ("2026-11-28", "2026-11-28T25:00:00Z")),
        ("uuid", ("3f2504e0-4f89-11d3-9A0C-0305e82c3301",), ("3f2504e0-4f89-11d3-9A0C", "x")),
    ],
)
def test_formats_of_texts(
    name: str, is_strict: bool, name_of_format: str, fitting: tuple[str, ...], others: tuple[str, ...]
) -> None:
    plain = {"type": "string", "format": name_of_format}
    for schema in (plain, {"anyOf": [plain, NOTHING]}):
        for value in fitting:
            assert takes(name, schema, value, is_strict=is_strict), (schema, value)
        for value in others:
            assert not takes(name, schema, value, is_strict=is_strict), (schema, value)
    assert takes(name, {"anyOf": [plain, NOTHING]}, None, is_strict=is_strict)


@in_tags
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"$ref": "#/$defs/Code"}, "pattern"),
        ({"anyOf": [{"$ref": "#/$defs/Code"}, NOTHING]}, "pattern"),
        ({"anyOf": [{"type": "string", "format": "email"}, NOTHING]}, "format"),
        ({"type": "string", "format": "date", "minLength": 1}, "format"),
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "object"}]}, "format"),
        ({"type": ["string", "integer"], "minimum": 1}, "minimum"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "items"),
        ({"anyOf": [{"type": "string"}, {"enum": [1, 2]}]}, "enum"),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "object"}]}, "maxLength"),
        ({"allOf": [{"type": "string", "maxLength": 3}, {"type": "string", "maxLength": 4}]}, "allOf"),
    ],
)
def test_a_strict_tool_with_what_texts_cannot_keep_is_refused(name: str, schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{keyword}' cannot be kept"):
        grammar_of(WRITTEN[name], with_argument(schema, is_strict=True))
    assert takes(name, schema, "xx")


@pytest.mark.parametrize("name", WITH_KINDS)
def test_strings_that_are_told_from_others_leave_other_types_exact(name: str) -> None:
    with pytest.raises(UnsupportedError, match="'pattern' cannot be kept"):
        grammar_of(WRITTEN[name], with_argument({"anyOf": [{"$ref": "#/$defs/Code"}]}, is_strict=True))
    positive = {"type": ["string", "integer"], "minimum": 1}
    assert takes(name, positive, "0", is_strict=True) and takes(name, positive, 1, is_strict=True)
    assert not takes(name, positive, 0, is_strict=True)
    nested = {"type": "array", "items": {"type": "object", "properties": {"c": {"$ref": "#/$defs/Color"}}}}
    assert takes(name, nested, [{"c": "red"}]) and not takes(name, nested, [{"c": "green"}])


@pytest.mark.parametrize("name", WITH_KINDS)
def test_strings_that_look_like_other_values_stay_strings(name: str) -> None:
    for value in ("12", "null", "[1]", "true"):
        assert takes(name, {}, value) and takes(name, {"type": ["string", "null"]}, value)


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_notation_of_its_own_keeps_arrays_and_objects_exactly(name: str) -> None:
    whole = {"type": "integer"}
    for schema, fitting, others in (
        ({"type": "array", "items": whole, "minItems": 1}, ([1], [1, 2, 3]), ([], ["a"])),
        ({"type": "array", "items": whole, "maxItems": 2}, ([], [1], [1, 2]), ([1, 2, 3],)),
        ({"type": "array", "items": whole, "minItems": 2.0, "maxItems": 2}, ([1, 2],), ([], [1], [1, 2, 3])),
        ({"type": "array", "items": whole, "minItems": 1, "maxItems": 1}, ([1],), ([], [1, 2])),
        ({"type": "array", "maxItems": 0}, ([],), ([1],)),
        ({"type": ["array", "null"], "minItems": 2, "maxItems": 1}, (None,), ([], [1], [1, 2])),
        ({"type": "array", "items": False}, ([],), ([1],)),
        ({"type": "object", "properties": {"b": whole}, "required": ["b", "c"]}, ({"b": 1, "c": "x"},), ({"b": 1}, {})),
        ({"type": "object", "properties": {"b": whole}}, ({}, {"b": 1}), ({"b": None},)),
        ({"type": "object", "additionalProperties": whole}, ({}, {"x y": 1, "z": 2}), ({"x": "a"},)),
        ({"type": "object", "additionalProperties": False}, ({},), ({"x": 1},)),
        ({"type": "object"}, ({}, {"x": {"y": ["a", 1.5]}}), ("x",)),
        ({"$ref": "#/$defs/Tree"}, ({"of": []}, {"of": [{"of": []}, {"of": []}]}), ({}, {"of": [1]})),
    ):
        for value in fitting:
            assert takes(name, schema, value, is_strict=True), (schema, value)
        for value in others:
            assert not takes(name, schema, value, is_strict=True), (schema, value)


@pytest.mark.parametrize("name", OF_THEIR_OWN)
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "prefixItems": [{"type": "integer"}]}, "prefixItems"),
        ({"type": "array", "items": [{"type": "integer"}]}, "items"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"b": {}}, "patternProperties": {"b": {}}}, "patternProperties"),
        ({"type": "array", "items": {"type": "array", "contains": {"const": 1}}}, "contains"),
    ],
)
def test_a_strict_tool_with_what_the_notation_cannot_keep_is_refused(name: str, schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{keyword}' cannot be kept; leave it out of the strict tool 'f'"):
        grammar_of(WRITTEN[name], with_argument(schema, is_strict=True))
    assert takes(name, schema, [] if schema["type"] == "array" else {})


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_strict_tool_with_values_nested_too_deep_is_refused(name: str) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5):
        schema = {"type": "array", "items": schema, "minItems": 1}
    with pytest.raises(UnsupportedError, match="within more than 4 others"):
        grammar_of(WRITTEN[name], with_argument(schema, is_strict=True))


@each_format
def test_parameters_behind_a_reference_or_in_alternatives(name: str) -> None:
    family = WRITTEN[name]
    first = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    second = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    for parameters in (
        {"$ref": "#/$defs/First", "$defs": {"First": first}},
        {"anyOf": [first]},
        {"type": "object", "allOf": [first]},
        {"oneOf": [first, second]},
    ):
        offer = ToolOffer([Tool("f", parameters)], is_required=True)
        assert keeps(family, offer, [("f", {"a": "x"})]), parameters
        assert keeps(family, offer, [("f", {"b": 1})]) is ("oneOf" in parameters)


def test_alternatives_of_all_parameters_are_refused_where_they_cannot_be_kept() -> None:
    parameters = {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    offer = ToolOffer([Tool("f", parameters, is_strict=True)])
    for name in (*IN_TAGS, *OF_THEIR_OWN, "pythonic", "gemma3"):
        with pytest.raises(UnsupportedError, match="leave anyOf and oneOf out of the strict tool 'f'"):
            grammar_of(WRITTEN[name], offer)
    grammar_of(WRITTEN["hermes"], offer)


@each_format
@pytest.mark.parametrize("is_strict", [False, True])
def test_references_to_other_places_than_definitions(name: str, is_strict: bool) -> None:
    properties = {
        "a": {"type": "integer", "minimum": 1},
        "b": {"$ref": "#/properties/a"},
        "c": {"type": "array", "items": {"$ref": "#/properties/b"}},
        "d": {"$ref": "#"},
        "e": {"$ref": "#/$defs/E"},
    }
    definitions = {"E": {"type": "array", "items": {"$ref": "#/properties/a"}}, "whole": {"type": "null"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"], "$defs": definitions}
    offer = ToolOffer([Tool("f", parameters, is_strict)], is_required=True)
    assert keeps(WRITTEN[name], offer, [("f", {"a": 1, "b": 2, "c": [3], "e": [4]})])
    for wrong in ({"b": 0}, {"c": [0]}, {"e": [0]}, {"d": 3}):
        assert not keeps(WRITTEN[name], offer, [("f", {"a": 1, **wrong})])
    if name not in IN_PYTHON:  # there, nested objects are JSON
        assert keeps(WRITTEN[name], offer, [("f", {"a": 1, "d": {"a": 2, "d": {"a": 3}}})])


@each_format
def test_a_required_argument_without_a_schema_is_any_value(name: str) -> None:
    offer = ToolOffer([tool("f", {"a": {"type": "integer"}}, ["a", "x"])], is_required=True)
    assert keeps(WRITTEN[name], offer, [("f", {"a": 1, "x": 2})])
    assert not keeps(WRITTEN[name], offer, [("f", {"a": 1})])


@in_tags
def test_a_reference_to_nothing_is_no_permission(name: str) -> None:
    assert LLMatcher(VOCABULARY, grammar_of(WRITTEN[name], with_argument({"$ref": "#/$defs/Unknown"}))).is_error()


def test_alternatives_that_cannot_be_told_are_left_whole() -> None:
    """Schemas that refer to themselves, or multiply, end."""
    loop = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}}
    wide = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}] * 100}}}
    many = {"allOf": [{"anyOf": [{"minLength": one} for one in range(100)]}] * 9}
    for root in (loop, wide, many):
        found = alternatives(root if root is many else {"$ref": "#/$defs/A"}, root)
        assert found and all(len(types_within(one)) == 7 and "allOf" in one for one in found)


@in_tags
def test_many_schemas_for_one_argument_nest_no_deeper(name: str) -> None:
    family = WRITTEN[name]
    forms = [{"properties": {"a": {"type": "string", "minLength": least}}, "required": ["a"]} for least in range(300)]
    for keyword in ("anyOf", "allOf"):
        assert keeps(family, ToolOffer([Tool("f", {keyword: forms})], is_required=True), [("f", {"a": "x" * 300})])


@each_format
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": 3},
        {"$ref": "#/properties/a/0/b"},
        {"$ref": "#", "$defs": []},
        {"anyOf": [3, None]},
        {"allOf": {}, "enum": {}},
        {"type": "object", "properties": [], "required": 3},
        {"type": "string", "minLength": "x}", "enum": []},
        {"type": "array", "items": [{"type": 3}], "$defs": None},
    ],
)
def test_schemas_that_are_none_are_refused_or_left_out(name: str, schema: Any) -> None:
    """Whatever a client sends, there is a grammar or an error that the client is shown."""
    for is_strict in (False, True):
        try:
            grammar = grammar_of(WRITTEN[name], with_argument(schema, is_strict=is_strict))
        except InvalidRequestError as error:
            assert "'f'" in str(error)
        else:
            LLMatcher(VOCABULARY, grammar)


def test_alternatives_that_exclude_each_other_are_left_out() -> None:
    schema = {"type": "string", "anyOf": [{"minLength": 1}, {"type": "null"}, {"enum": [1, "a"]}]}
    assert alternatives(schema, {}) == [{"type": "string", "minLength": 1}, {"type": "string", "enum": [1, "a"]}]
    schema = {"type": "integer", "allOf": [{"type": "number", "minimum": 1}]}
    assert alternatives(schema, {}) == [{"type": "integer", "minimum": 1}]
