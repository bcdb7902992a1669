"""MiniMax-M3: nested elements are read by their schemas, and its whole responses through the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.text.tool_calls.formats import format_named, format_of
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.reading import MAX_DEPTH
from pagewick.text.tool_calls.written import WrittenCall
from tests.text.tool_calls.families import tool
from tests.text.tool_calls.later_forms import minimax_m3
from tests.text.tool_calls.test_formats import BY_FAMILY, read
from tests.text.tool_calls.test_grammars import accepts
from tests.text.tool_calls.test_newer_families import CALL, FamilyServer, parts_of
from tests.text.tool_calls.test_prompts_with_tools import ASK, CALLED, TOOLS, encoder, prompt, result

FAMILY = BY_FAMILY["minimax_m3"]
MARK = "]<]minimax[>["
# Each is decided by its schema alone; texts are not those of the format.
LEAVES = st.one_of(
    st.integers().map(lambda one: (one, {"type": "integer"})),
    st.booleans().map(lambda one: (one, {"type": "boolean"})),
    st.text(st.sampled_from("ab<>/[]{}:\n 1é"), max_size=5).map(lambda one: (one, {"type": "string"})),
)
KEYS = st.sampled_from(["a", "item", "b c", "ké-y"])


def _list_of(values: list[Any]) -> Any:
    found = [value for value, _ in values]
    schemas = [schema for _, schema in values]
    return found, {"type": "array", "items": schemas[0] if schemas else {}}


def _object_of(members: dict[str, Any]) -> Any:
    properties = {key: schema for key, (_, schema) in members.items()}
    return {key: value for key, (value, _) in members.items()}, {"type": "object", "properties": properties}


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda one: _list_of([one])),
        inner.map(lambda one: _list_of([one, one])),
        st.just(_list_of([])),
        st.dictionaries(KEYS, inner, max_size=3).map(_object_of),
    ),
    max_leaves=5,
)


@given(VALUES, st.integers(1, 400))
def test_values_of_any_type_are_read_back_and_allowed(pair: Any, cut: int) -> None:
    value, schema = pair
    offer = ToolOffer([tool("f", {"a": schema})], is_required=True)
    text = minimax_m3([("f", {"a": value})])
    for is_guided in (False, True):
        found = read(FAMILY, text, min(cut, len(text)), offer=offer, is_guided=is_guided)
        assert found.parsed == [("f", {"a": value})] and found.shown == "" and found.whole == text
    assert read(FAMILY, text, offer=offer, has_tokens=True).parsed == [("f", {"a": value})]
    if depth_of(value) <= 4:
        assert accepts(FAMILY, offer, text)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth_of, inner), default=-1) if isinstance(value, list | dict) else 0


def read_value(schema: Any, *written: str) -> Any:
    """Return the argument `a` of a call, or None if the text is no call. written: with % for the mark."""
    text = f'%<tool_call>\n%<invoke name="f">%<a>{"".join(written)}%</a>%</invoke>\n%</tool_call>'.replace("%", MARK)
    values = []
    for has_tokens in (False, True):
        found = read(FAMILY, text, offer=ToolOffer([tool("f", {"a": schema})]), has_tokens=has_tokens)
        assert found.whole == found.fed and (found.calls or found.shown == found.whole)
        value = found.parsed[0][1]["a"] if found.calls else None
        # OutputStream gives the letters of tokens within arguments.
        values.append(value.replace("\ud810", MARK) if isinstance(value, str) else value)
    assert values[0] == values[1]
    return values[0]


NUMBERS = {"type": "array", "items": {"type": "number"}}
NAMED = {"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({}, "x", "x"),
        ({}, "12", 12),
        ({}, "%<item>1%</item>%<item>a%</item>", [1, "a"]),
        ({}, "%<k>1%</k>%<l>%<item>x%</item>%</l>", {"k": 1, "l": ["x"]}),
        ({"anyOf": [NUMBERS, {"type": "string"}]}, "", ""),
        ({"anyOf": [NUMBERS, {"type": "null"}]}, "", []),
        ({"anyOf": [NAMED, {"type": "null"}]}, "null", None),
        ({"anyOf": [NAMED, NUMBERS]}, "\n%<item>1%</item>\n%<item>2.5%</item>\n", [1, 2.5]),
        ({"anyOf": [NAMED, NUMBERS]}, "\n %<n>3%</n>\n %<k> 4 %</k>\n", {"n": 3, "k": " 4 "}),
        ({"properties": {"item": {"type": "string"}}}, "%<item>1%</item>", {"item": "1"}),
        # A key that no schema names ends at any closing tag, since a grammar cannot demand this one.
        ({"type": "object", "additionalProperties": {"type": "string"}}, "%<x>1%</y>%<z>2%</z>", {"x": "1", "z": "2"}),
        (NUMBERS, "[1, 2.5]", [1, 2.5]),
        (NAMED, "{'k': 'x', 'n': None}", {"k": "x", "n": None}),
        ({"type": "string"}, "see %<b> and %</c>", f"see {MARK}<b> and {MARK}</c>"),
        ({"type": ["string", "array"]}, "see %<b> and", f"see {MARK}<b> and"),
        (NUMBERS, "see %<b> and", None),
        (NUMBERS, "%<b>1%</b>", None),
        (NUMBERS, "%<item>1%</item>%<b>1%</b>", None),
        ({"type": "object"}, "%<x>1", None),
    ],
)
def test_values_in_other_forms(schema: Any, written: str, value: Any) -> None:
    assert read_value(schema, written) == value


def test_values_nested_too_deep_are_no_call() -> None:
    for depth, is_read in ((MAX_DEPTH - 2, True), (MAX_DEPTH + 1, False)):
        found = read_value({}, "%<item>" * depth, "x", "%</item>" * depth)
        assert (found is not None) is is_read


def test_it_is_written_as_the_template_does() -> None:
    form = format_named("minimax-m3")
    calls = [WrittenCall("f", '{"a": [{"b": "x", "c": null}, 1.5, true, []]}'), WrittenCall("g", "{}")]
    assert form.written(calls) == minimax_m3([("f", {"a": [{"b": "x"}, 1.5, True, []]}), ("g", {})])
    assert format_of(["{% set ns_token = ']<]minimax[>[' %}{{ ns_token ~ '<tool_call>' }}"]) is form


def test_thoughts_text_and_calls() -> None:
    response = f"<mm:think>I look.</mm:think>So:{minimax_m3(CALL)}"
    assert parts_of(FamilyServer("MiniMax-M3", response).message()) == ("I look.", "So:", CALL)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert parts_of(FamilyServer("MiniMax-M3", minimax_m3(CALL * 2)).message(**off)) == (None, None, CALL * 2)


def test_the_switch_of_thoughts_sets_the_templates_mode() -> None:
    maker, _ = encoder("MiniMax-M3")
    assert maker.can_think_by_switch
    for variables, mode, begun in (
        ({}, "adaptive", ""),
        ({"enable_thinking": True}, "enabled", "<mm:think>"),
        ({"thinking": False}, "disabled", "</mm:think>"),
        ({"thinking": False, "thinking_mode": "adaptive"}, "adaptive", ""),
    ):
        text = maker.render_chat([ASK], chat_template_kwargs=variables).text
        assert f"Thinking is {mode}." in text and text.endswith(f"]~b]ai\n{begun}")


def test_calls_and_results_in_prompts() -> None:
    text = prompt("MiniMax-M3", ASK, CALLED, result("c1", "windy"), tools=TOOLS)
    assert f"</mm:think>{minimax_m3([('get_weather', {'city': 'Rome'})])}[e~[" in text
    assert text.endswith("]~b]tool\n<response>windy</response>[e~[\n]~b]ai\n")
