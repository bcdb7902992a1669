"""Templates that fail with the tools of a request are rendered with tools that mean the same; others are not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import InvalidRequestError
from pagewick.text import template_environment
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.plain_tools import complete_tools, schema_without_null
from tests.tiny_text import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={"eos_token": "</s>"})
ASK = {"role": "user", "content": "How is it?"}
# As Hermes 2 Pro and 3 name the types of arguments: texts can be looped over, too.
HERMES = """
{%- set names = {'string': 'str', 'integer': 'int'} %}
{%- macro named(spec) %}
    {%- if names[spec.type] is defined %}{{ names[spec.type] }}
    {%- elif spec.type is iterable %}Union[{% for one in spec.type %}{{ named({'type': one}) }},{% endfor %}]
    {%- else %}Any{% endif %}
{%- endmacro %}
{%- for tool in tools or [] %}{{ tool.function.name + ': ' + tool.function.description + '(' }}
{%- for key, spec in tool.function.parameters.properties | items %}{{ key + ': ' + named(spec) }}, {% endfor -%}
) {{ tool.function.parameters | tojson }} {% endfor %}
{{- messages[0].content }}"""


def prompt(source: str, *functions: dict[str, Any]) -> str:
    template = ChatTemplate({"default": source}, TOKENIZER)
    tools = [{"type": "function", "function": one} for one in functions]
    given = copy.deepcopy(tools)
    text = PromptEncoder(TOKENIZER, template, max_model_len=4096).render_chat([ASK], tools).text
    assert tools == given
    return text


def function(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "f", "description": "Do.", "parameters": {"type": "object", "properties": properties, **more}}


def test_null_in_a_list_of_types() -> None:
    text = prompt(HERMES, function({"a": {"type": ["string", "null"]}, "b": {"type": "integer"}}))
    assert text.startswith("f: Do.(a: str, b: int, )")
    assert '"a": {"type": "string", "nullable": true}, "b": {"type": "integer"}' in text
    assert text.endswith("How is it?")
    text = prompt(HERMES, function({"a": {"type": ["null", "string", "integer"]}}))
    assert text.startswith("f: Do.(a: Union[str,int,], )")


def test_tools_that_a_template_knows_stay() -> None:
    text = prompt(HERMES, function({"a": {"type": ["string", "integer"]}}))
    assert text.startswith("f: Do.(a: Union[str,int,], )") and '"a": {"type": ["string", "integer"]}' in text
    text = prompt("{{ tools | tojson }}", {"name": "f", "parameters": {"properties": {"a": {"type": ["null"]}}}})
    assert json.loads(text)[0]["function"] == {"name": "f", "parameters": {"properties": {"a": {"type": ["null"]}}}}


@pytest.mark.parametrize(
    "lacking",
    [{"name": "f"}, {"name": "f", "description": None, "parameters": None}, {"name": "f", "parameters": {}},
     {"name": "f", "parameters": {"type": "object"}}],
)  # fmt: skip
def test_fields_that_a_client_left_out(lacking: dict[str, Any]) -> None:
    """OpenAI's API needs neither a description nor parameters; several templates do."""
    assert prompt(HERMES, lacking).startswith('f: () {"type": "object", "properties": {}}')


def test_both_at_once() -> None:
    nullable = {"type": "object", "properties": {"a": {"type": "null"}}}
    for functions in (({"name": "f", "parameters": nullable},), (function({}), {"name": "g", "parameters": nullable})):
        assert '{"a": {"enum": [null]}}' in prompt(HERMES, *functions)


def test_a_template_that_fails_for_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": function({"a": {"type": ["string", "null"]}})}, {"function": {}}]
    for source, reason in (
        ("{{ raise_exception('No tools here') if tools }}", "rejects the messages: No tools here"),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "too deep a recursion, perhaps in a macro that calls itself",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            ChatTemplate({"default": source}, TOKENIZER).render([ASK], tools)
    monkeypatch.setattr(template_environment, "MAX_SECONDS", 0.05)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=r"more than 0\.05 seconds"):
        ChatTemplate({"default": endless}, TOKENIZER).render([ASK], tools)


def test_names_and_values_that_look_like_keywords_stay() -> None:
    schema = {
        "properties": {"type": {"const": {"type": "null"}}, "items": {"enum": [{"type": ["null"]}]}},
        "default": {"type": "null"},
        "items": True,
    }
    assert schema_without_null(schema) == schema
    assert complete_tools(["no tool", {"type": "other"}]) == ["no tool", {"type": "other"}]


KINDS = st.sampled_from(["null", "string", "integer", "array", "object"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": KINDS | st.lists(KINDS, min_size=1, unique=True)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": KINDS | st.lists(KINDS, min_size=1, unique=True),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "items": inner,
            "properties": st.dictionaries(st.sampled_from(["type", "a"]), inner, max_size=2),
            "additionalProperties": inner | st.booleans(),
        },
    ),
    max_leaves=6,
)


def types_of(schema: Any) -> Any:
    """Put the types of a schema into one form: lists in their order, with null."""
    if isinstance(schema, list):
        return [types_of(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: types_of(one) for key, one in schema.items() if key not in ("type", "nullable", "enum")}
    if isinstance(schema.get("type"), dict):  # properties with this name
        return {**found, "type": types_of(schema["type"])}
    kind = ["null"] if schema.get("enum") == [None] else schema.get("type", [])
    kinds = [kind] if isinstance(kind, str) else [*kind]
    return {**found, "type": sorted(kinds + ["null"] * schema.get("nullable", False))}


@given(SCHEMAS)
def test_all_types_are_still_there(schema: dict[str, Any]) -> None:
    plain = schema_without_null(schema)
    assert '"null"' not in json.dumps(plain) and types_of(plain) == types_of(schema)
