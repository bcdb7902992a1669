"""Values without quotes: each has the type that its schema asks for, whether as JSON or as Python prints it."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.text.tool_calls.plain_values import json_of
from pagewick.text.tool_calls.reading import MAX_DEPTH
from tests.text.tool_calls.test_formats import BY_FAMILY, read

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
NESTED = st.recursive(
    LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=3), one, max_size=3), max_leaves=6
)


@given(st.lists(NESTED, max_size=3) | st.dictionaries(st.text(max_size=3), NESTED, max_size=3))
def test_what_python_prints_is_read_back(value: Any) -> None:
    kind = "array" if isinstance(value, list) else "object"
    for types in (frozenset({kind}), frozenset({kind, "string"}), ANY):
        assert json.loads(json_of(f" {value!r}\n", types)) == value == json.loads(json_of(json.dumps(value), types))
    assert json.loads(json_of(repr(value), frozenset({"string", "integer"}))) == repr(value)


@pytest.mark.parametrize(
    "text",
    ["[x]", "[1, 2", "{'a'}", "{'a': }", "{'a': 1}.", "{'a': 1} {'b': 2}", "[1][0]", "{1: 2}", "{'a': print()}",
     "['a' 'b']", "[1 + 1]", "{'a': 1e}", "[nan]", "{**{}}", "(1, 2)", "(555)", "[..]", "{", "['\\uZZZZ']", "[b'x']",
     "[1,,2]", "{'a': NaN}",
     "[" * (MAX_DEPTH + 2) + "'x'" + "]" * (MAX_DEPTH + 2), "[" * 100_000, "[1" + "0" * 5000 + "]"],
)  # fmt: skip
def test_other_texts_stay_texts(text: str) -> None:
    for types in (ANY, frozenset({"array", "object"})):
        assert json.loads(json_of(text, types)) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': True, \"b\": [None, 'it\\'s', (1, 2.5e-07)],}", {"a": True, "b": [None, "it's", [1, 2.5e-07]]}),
        ("{'a': true, 'b': null}", {"a": True, "b": None}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ("['\\x41\\u00e9\\U0001f600']", ["A\u00e9\U0001f600"]),
    ],
)
def test_python_as_models_write_it(text: str, value: Any) -> None:
    assert json.loads(json_of(text, ANY)) == value


@given(st.text(st.sampled_from("{}[](),:'\"\\ \n1a-.eTrueNone"), max_size=24))
def test_nothing_else_is_read_than_python_reads(text: str) -> None:
    """A list or an object that comes back was JSON, or has the value that Python gives to its literal."""
    found = json.loads(json_of(text, ANY))
    if isinstance(found, list | dict) and found != loaded(text):
        try:
            expected = ast.literal_eval(text.strip())
        except (SyntaxError, ValueError):
            is_close = re.search(r"\n|true|null|\\|['\"][a-zA-Z0-9]", text)
            assert is_close is not None, (text, found)
            return
        assert found == json.loads(json.dumps(expected))


def loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_objects_of_seed_oss_and_minicpm() -> None:
    """As their templates print a call of the history."""
    deep, expected = "{'a': 'q', 'b': 0}", [("mix-it_2", {"flag": True, "deep": {"a": "q", "b": 0}})]
    seed = (
        f"<seed:tool_call>\n<function=mix-it_2>\n<parameter=flag>True</parameter>\n<parameter=deep>{deep}</parameter>\n"
    )
    assert read(BY_FAMILY["seed_oss"], f"{seed}</function>\n</seed:tool_call>").parsed == expected
    mini = f'<function name="mix-it_2"><param name="flag">True</param><param name="deep">{deep}</param></function>'
    assert read(BY_FAMILY["minicpm_5"], mini).parsed == expected
