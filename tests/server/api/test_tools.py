"""The fields about tools, and responses with calls in OpenAI's present and former form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from openai.types.chat import ChatCompletion

from pagewick.errors import InvalidRequestError
from pagewick.text.grammars.checker import GrammarChecker
from pagewick.text.grammars.vocabulary import make_small_vocabulary, special_tokens
from tests.fake_engine import END, TOKENIZER, FakeClient
from tests.server.api.other_dialect import Served
from tests.server.api_routes import CHAT, HELLO, events_of
from tests.text.tool_calls.families import FAMILIES, Family
from tests.text.tool_calls.forms import Call

LOOK = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
WAIT = {"name": "wait"}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": WAIT}]
LOOKS = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
ARGUMENTS = '{"at": "é 😀 \\"x\\""}'
CALLED = (
    f'I look.\n\n<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)


class Writer(FakeClient):
    """Writes tags as single tokens."""

    def _token_ids(self, index: int) -> list[int]:
        return [*TOKENIZER.encode(self.texts[index % len(self.texts)], add_special_tokens=False), END]


@pytest.fixture(autouse=True)
def checks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars are checked without a process for each server."""
    vocabulary = make_small_vocabulary(special_tokens(TOKENIZER), TOKENIZER.vocab_size)

    def check(checker: GrammarChecker, grammar: str, param: str, excluded: tuple[str, ...] = ()) -> None:
        if reason := LLMatcher.validate_grammar(grammar, vocabulary):
            raise InvalidRequestError(reason, param=param)

    monkeypatch.setattr(GrammarChecker, "check", check)


def served(text: str = CALLED, **options: Any) -> Served:
    server = Served(has_own_format=True, **options)
    server.client = Writer()
    server.client.texts = [text]
    return server


def prompt_of(server: Served) -> str:
    return TOKENIZER.decode(server.client.requests[-1].prompt_token_ids, skip_special_tokens=False)


def message_of(server: Served, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message of a response, which must be the same when it is streamed, and its finish reason."""
    response = server.post(CHAT, messages=HELLO, **fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    ChatCompletion.model_validate(response.json())
    streamed, reason = joined(events_of(server.post(CHAT, messages=HELLO, stream=True, **fields)))
    assert without_ids(streamed) == without_ids(choice["message"]) and reason == choice["finish_reason"]
    return choice["message"], reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def joined(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Accumulate chunks as the official client does: strings are joined, calls are found by their index."""
    message: dict[str, Any] = {"refusal": None}
    reason = ""
    for event in events:
        (choice,) = event["choices"]
        reason += choice["finish_reason"] or ""
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                (call,) = value
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    calls.append({name: value for name, value in call.items() if name != "index"})
                else:
                    assert call["index"] == len(calls) - 1 and call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"} and call["function"]["arguments"]
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            elif name == "function_call":
                found = message.setdefault("function_call", {"name": "", "arguments": ""})
                for key, text in value.items():
                    found[key] += text
            elif value is None:
                message.setdefault(name, None)
            else:
                message[name] = (message.get(name) or "") + value
    return message, reason


def test_calls_of_a_response() -> None:
    message, reason = message_of(served(), tools=TOOLS)
    assert message["content"] == "I look." and reason == "tool_calls"
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "look", "arguments": ARGUMENTS}
    assert second["function"] == {"name": "wait", "arguments": "{}"}
    assert first["id"] != second["id"] and first["id"].startswith("call_")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.parser}-{family.name}")
def test_calls_in_every_format(family: Family) -> None:
    calls: list[Call] = [("look", {"at": 'é 😀 "x"'}), ("wait", {})][: family.max_calls]
    before = "" if family.is_bare else "I look.\n\n"
    server = served(before + family.write(calls), tool_call_parser=family.parser)
    message, reason = message_of(server, tools=TOOLS)
    assert message["content"] == (before.strip() or None) and reason == "tool_calls"
    found = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]
    assert found == calls


def test_arguments_come_in_pieces() -> None:
    events = events_of(served().post(CHAT, messages=HELLO, stream=True, tools=TOOLS))
    pieces = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert len(pieces) > 5


def test_content_is_null_beside_calls_alone() -> None:
    message, _ = message_of(served(CALLED.removeprefix("I look.")), tools=TOOLS)
    assert message["content"] is None and len(message["tool_calls"]) == 2


def test_a_response_without_calls() -> None:
    message, reason = message_of(served("Just text."), tools=TOOLS)
    assert (message["content"], reason) == ("Just text.", "stop") and "tool_calls" not in message


def test_calls_are_text_where_none_is_allowed() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message, reason = message_of(served(), **fields)
        assert (message["content"], reason) == (CALLED, "stop")


def test_tools_are_in_the_prompt_unless_none_is_allowed() -> None:
    server = served()
    for choice, is_told in (
        ("auto", True),
        ("none", False),
        ({"type": "function", "function": {"name": "wait"}}, True),
    ):
        server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice=choice)
        assert ('"name": "look"' in prompt_of(server)) is is_told


@pytest.mark.parametrize("fields", [{"functions": [LOOK, WAIT]}, {"functions": [LOOK], "function_call": "auto"}])
def test_the_former_form(fields: dict[str, Any]) -> None:
    message, reason = message_of(served(CALLED.partition('\n<tool_call>\n{"name": "wait')[0]), **fields)
    assert message["function_call"] == {"name": "look", "arguments": ARGUMENTS} and reason == "function_call"
    assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("choice", "names", "is_required", "is_parallel"),
    [
        ({"tool_choice": "auto"}, ["look", "wait"], False, True),
        ({"tool_choice": None}, ["look", "wait"], False, True),
        ({"tool_choice": "required"}, ["look", "wait"], True, True),
        ({"parallel_tool_calls": False}, ["look", "wait"], False, False),
        ({"tool_choice": {"type": "function", "function": {"name": "wait"}}}, ["wait"], True, False),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "look"}}],
                    },
                }
            },
            ["look"],
            True,
            True,
        ),
    ],
)
def test_every_choice_constrains_the_response(
    choice: dict[str, Any], names: list[str], is_required: bool, is_parallel: bool
) -> None:
    server = served()
    assert server.post(CHAT, messages=HELLO, tools=TOOLS, **choice).status_code == 200
    constraint = server.client.requests[-1].constraint
    assert isinstance(constraint, dict) and constraint["param"] == "tools"
    lark = json.loads(constraint["grammar"])["grammars"][-1]["lark_grammar"]
    assert [name for name in ("look", "wait") if f'\\"{name}\\"' in lark] == names
    assert ("TEXT" in lark) is not is_required and (")*" in lark) is is_parallel


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "'custom' is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "got 'a b'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "another tool"),
        ({"tools": TOOLS * 65}, "tools", "at most 128"),
        ({"tools": "look"}, "tools", "expected an array"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "functions": [WAIT]}, "functions", "former name"),
        ({"tools": TOOLS, "tool_choice": "auto", "function_call": "none"}, "function_call", "former name"),
        ({"functions": [WAIT], "function_call": {"name": "look"}}, "function_call", "'look'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice",
            "is empty",
        ),
    ],
)
def test_wrong_fields(fields: dict[str, Any], param: str, words: str) -> None:
    server = served()
    response = server.post(CHAT, messages=HELLO, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error
    assert not server.client.requests


@pytest.mark.parametrize(
    ("schema", "strict", "param"),
    [
        ({"type": "string"}, None, "tools[0].function.parameters.type"),
        ({"type": "object", "properties": []}, None, "tools[0].function.parameters.properties"),
        (
            {"type": "object", "properties": {"a": {"type": "text"}}},
            None,
            "tools[0].function.parameters.properties.a.type",
        ),
        ({"properties": {"a": {"type": {}}}}, None, "tools[0].function.parameters.properties.a.type"),
        (
            {"properties": {"a": {"type": [{"type": "string"}, "null"]}}},
            None,
            "tools[0].function.parameters.properties.a.type",
        ),
        ({"type": "object", "required": "a"}, None, "tools[0].function.parameters.required"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/x"}}}, None, "tools"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}}, True, "tools"),
    ],
)
def test_wrong_schemas(schema: dict[str, Any], strict: bool | None, param: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": schema, "strict": strict}}
    response = served().post(CHAT, messages=HELLO, tools=[tool])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.json()


def test_keywords_beyond_the_grammar_are_for_tools_that_are_not_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    assert served().post(CHAT, messages=HELLO, tools=[tool]).status_code == 200


def test_stop_strings_do_not_cut_calls() -> None:
    message, reason = message_of(served(), tools=TOOLS, stop=["é"])
    assert reason == "tool_calls" and message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_thoughts_text_and_calls() -> None:
    message, reason = message_of(served("<think>\nHm.\n</think>\n\n" + CALLED), tools=TOOLS)
    assert (message["reasoning_content"], message["content"], reason) == ("Hm.", "I look.", "tool_calls")
    assert len(message["tool_calls"]) == 2


def test_a_model_without_a_format_refuses_tools() -> None:
    server = Served(has_format=False)
    response = server.post(CHAT, messages=HELLO, tools=TOOLS)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools"


def test_the_prompt_of_tools_is_that_of_other_routes() -> None:
    server = served()
    shuffled = {"function": {"strict": None, "parameters": None, "name": "go"}, "type": "function"}
    for tools in (TOOLS, [shuffled, {"function": {**LOOK, "returns": {}}}], []):
        assert server.post(CHAT, messages=HELLO, tools=tools).status_code == 200
        token_ids = server.client.requests[-1].prompt_token_ids
        assert server.post("/tokenize", messages=HELLO, tools=tools).json()["tokens"] == token_ids
        assert server.post("/apply-template", messages=HELLO, tools=tools).json()["prompt"] == prompt_of(server)


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
def test_wrong_tools_are_refused_by_other_routes(path: str) -> None:
    for tools, param in (
        ([{}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([*TOOLS, TOOLS[0]], "tools[2].function.name"),
        ([{"type": "custom"}], "tools[0].type"),
    ):
        response = served().post(path, messages=HELLO, tools=tools)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
