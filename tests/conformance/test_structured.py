"""Points 69 to 73: structured output, with the official client in all of its modes."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.conformance.callers import Caller, Way, error_of, user
from tests.conformance.servers import MODEL, Server
from tests.conformance.test_tools import WEATHER, tools

ASK = [user("Which port does the server listen on by default?")]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
        "kind": {"enum": ["cpu", "gpu"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["port", "kind", "tags"],
    "additionalProperties": False,
}


class Kind(Enum):
    """A kind of machine."""

    CPU = "cpu"
    GPU = "gpu"


def schema_format(schema: Any = SCHEMA, **changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **changes}}


def extra(**fields: Any) -> dict[str, Any]:
    return {"messages": ASK, "max_tokens": 200, "extra_body": fields}


def test_point_69_json_objects(server: Server, way: Way) -> None:
    """A finished response is a JSON object."""
    wanted = {"messages": ASK, "response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 1}
    # With a bias for both braces, the model ends the object as soon as it may.
    braces = [server.http.post("/tokenize", json={"content": brace}).json()["tokens"][-1] for brace in "{}"]
    response = way.chat(**wanted, logit_bias={str(token_id): 100 for token_id in braces})
    assert (response.text, response.finish_reason) == ("{}", "stop")
    response = way.chat(**wanted, n=3)
    for choice in response.choices:
        assert choice.text.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.text), dict)


@pytest.mark.parametrize("strict", [True, False, None])
def test_point_70_json_schemas(way: Way, strict: bool | None) -> None:
    """A finished response validates against its schema, strict or not, each of several choices."""
    response = way.chat(messages=ASK, response_format=schema_format(strict=strict), max_tokens=300, temperature=1, n=2)
    for choice in response.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMA)


class Address(BaseModel):
    host: Literal["localhost", "0.0.0.0"]
    port: int = Field(ge=1, le=65535)


class Answer(BaseModel):
    """A model with all that the client's strict schemas express: references, optional and nested values, choices."""

    kind: Kind
    first: Address
    others: list[Address] = Field(max_length=2)
    note: str | None = Field(max_length=8)
    is_open: bool


def test_point_70_pydantic_models(caller: Caller) -> None:
    """The client returns an instance of a pydantic model, streamed or not."""
    fields = {"messages": ASK, "response_format": Answer, "max_tokens": 400, "temperature": 1}
    for response in (caller.parsed(**fields), caller.accumulated(**fields)):
        assert isinstance(response.choices[0].message.parsed, Answer)


def test_point_70_json_schemas_beside_tools(server: Server, way: Way) -> None:
    """A response has calls, or a text that validates; if a call is required, it has calls."""
    question = [user("what is the weather in Rome?")]
    fields = {"messages": question, "tools": tools(WEATHER), "response_format": schema_format(), "max_tokens": 300}
    for tool_choice in ("auto", "required"):
        (choice,) = way.chat(**fields, temperature=0, tool_choice=tool_choice).choices
        assert choice.finish_reason == "tool_calls" and not choice.text
        assert [json.loads(call.arguments) for call in choice.calls] == [{"city": "Rome"}]
    (marker,) = server.tokens("<tool_call>")
    for more in ({"logit_bias": {str(marker): -100}}, {"tool_choice": "none"}):
        (choice,) = way.chat(**fields, temperature=1, **more).choices
        assert choice.finish_reason == "stop" and not choice.calls
        jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_point_73_forms_beside_tools(callers: dict[str, Caller]) -> None:
    """Choices and regular expressions can be combined with tools; grammars cannot, since they may name any token."""
    way = Way(callers["sync"], is_streamed=False)
    fields = {"messages": ASK, "tools": tools(WEATHER), "max_tokens": 60, "temperature": 0}
    (choice,) = way.chat(**fields, extra_body={"guided_choice": ["yes", "no"]}).choices
    assert choice.calls or choice.text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="guided_grammar cannot be combined with tools"):
        way.chat(**fields, extra_body={"guided_grammar": 'start: "a"'})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"$ref": "https://example.com/schema.json"}, "$ref"),
        ({"type": "sting"}, "sting"),
        ({"enum": [1234567890123456789, 2]}, "the keyword enum"),
        ({"enum": []}, "nsatisfiable"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}, "response_format"),
        ({"enum": [f"v{i}" for i in range(100_000)]}, "--max-grammar-size"),
        (17, "a JSON schema"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_point_71_hostile_schemas(way: Way, schema: Any, words: str) -> None:
    """The server soon refuses by name whatever it cannot honour exactly."""
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError) as failure:
        way.chat(messages=ASK, response_format=schema_format(schema))
    error = error_of(failure.value)
    assert error["param"] == "response_format" and words in error["message"]
    assert len(error["message"]) < 700 and time.monotonic() - began < 60


def test_point_71_hostile_schemas_beside_others(server: Server, callers: dict[str, Caller]) -> None:
    """A grammar that takes too long to compile is given up, and disturbs no other request."""
    slow = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(6000)}}
    with ThreadPoolExecutor(1) as other:
        refused = other.submit(
            server.http.post,
            "/v1/chat/completions",
            json={"model": MODEL, "messages": ASK, "response_format": schema_format(slow)},
        )
        assert (
            "8000"
            in callers["sync"]
            .client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
            .choices[0]
            .message.content
        )
        assert refused.result().status_code == 400


def test_point_72_json_that_is_cut_off(way: Way) -> None:
    """JSON that max_tokens cuts says so in `finish_reason`."""
    response = way.chat(messages=ASK, response_format=schema_format(), max_tokens=3, temperature=0)
    assert response.finish_reason == "length" and response.text.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(response.text)


def test_point_72_the_clients_own_error(caller: Caller) -> None:
    """The client refuses to make a model out of JSON that is cut off."""
    fields = {"messages": ASK, "response_format": Answer, "max_tokens": 3}
    for call in (caller.parsed, caller.accumulated):
        with pytest.raises(openai.LengthFinishReasonError):
            call(**fields)


def test_point_73_regular_expressions_choices_grammars(way: Way) -> None:
    """The names of vLLM, llama.cpp and vllm.rs for the other forms."""

    def said(**fields: Any) -> str:
        response = way.chat(**extra(**fields), temperature=1)
        assert response.finish_reason == "stop"
        return response.text

    for fields in ({"guided_regex": "[a-c]{2}-[0-9]{3}"}, {"structured_outputs": {"regex": "[a-c]{2}-[0-9]{3}"}},
                   {"constraint": "[a-c]{2}-[0-9]{3}", "constraint_type": "regex"}):  # fmt: skip
        assert re.fullmatch("[a-c]{2}-[0-9]{3}", said(**fields))
    for fields in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert said(**fields) in ("yes", "no")
    for fields in ({"grammar": 'root ::= "x" [0-9]{2} "y"'}, {"guided_grammar": 'start: "x" /[0-9]{2}/ "y"'},
                   {"constraint": 'start: "x" /[0-9]{2}/ "y"'}):  # fmt: skip
        assert re.fullmatch("x[0-9]{2}y", said(**fields))
    text = json.dumps(SCHEMA)
    for fields in ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}, {"structured_outputs": {"json": text}},
                   {"constraint": text, "constraint_type": "json_schema"}):  # fmt: skip
        jsonschema.validate(json.loads(said(**fields)), SCHEMA)


def test_point_73_completions(way: Way) -> None:
    """Completions take a form, too."""
    response = way.completion(prompt="The answer is", max_tokens=20, extra_body={"guided_choice": ["left", "right"]})
    assert response.text in ("left", "right")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": []},
        {"guided_regex": ""},
        {"guided_grammar": ""},
        {"guided_json": ""},
        {"json_schema": ""},
        {"constraint": ""},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None}},
        {"structured_outputs": {"choice": [""]}},
        {"constraint_type": "regex"},
        {"guided_whitespace_pattern": " "},
        {"response_format": {}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
    ],
    ids=str,
)
def test_an_empty_form_is_refused(callers: dict[str, Caller], fields: dict[str, Any]) -> None:
    """A form that is empty or incomplete is a 400 that names its field, and what to do."""
    way = Way(callers["sync"], is_streamed=False)
    with pytest.raises(openai.BadRequestError) as failure:
        way.chat(**extra(**fields))
    error, (name,) = error_of(failure.value), fields
    assert error["param"] == name and error["message"].startswith(name)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"grammar": "root ::= foo"}, "the rule foo is used, but not defined"),
        ({"grammar": "root ::= []"}, "unclosed character class"),
        ({"guided_regex": "[0-9{4}"}, "unclosed character class"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "look-around, including look-ahead and look-behind"),
        ({"guided_json": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}, "must exclude each other"),
    ],
    ids=str,
)
def test_a_wrong_form_is_refused_with_its_reason(
    callers: dict[str, Caller], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        Way(callers["sync"], is_streamed=False).chat(**extra(**fields))
    error, (name,) = error_of(failure.value), fields
    assert error["param"] == name and error["message"].startswith(name) and reason in error["message"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_form_of_which_no_token_is_allowed(server: Server, has_begun: bool) -> None:
    """The request is the cause, so it is a 400, which clients do not retry, or an event of a stream that has begun."""
    token_ids = server.tokens("y")[-1:] if has_begun else [402, 579]
    wanted = {"prompt": "x", "allowed_token_ids": token_ids, "structured_outputs": {"choice": ["yz", "no"]}}
    response = server.http.post("/v1/completions", json=wanted)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "no token was allowed next: allowed_token_ids, bad_words" in error["message"]
    streamed = server.http.post("/v1/completions", json={**wanted, "stream": True})
    if has_begun:
        events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert streamed.status_code == 200 and json.loads(events[-1]) == {"error": error}
    else:
        assert (streamed.status_code, streamed.json()) == (400, {"error": error})


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": None, "structured_outputs": None, "guided_choice": None, "guided_json": None},
        {"grammar": ""},
        {"guided_json_object": False},
        {"response_format": {"type": "text"}},
        {"tools": [], "functions": [], "tool_choice": None, "function_call": None, "parallel_tool_calls": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
    ],
    ids=str,
)
def test_values_that_stand_for_no_form(callers: dict[str, Caller], fields: dict[str, Any]) -> None:
    """Null is the same as leaving a field out, and so are other programs' values for nothing."""
    plain, same = (callers["sync"].chat(**extra(temperature=0, **more)) for more in ({}, fields))
    assert same.choices[0].message == plain.choices[0].message


def test_a_json_object_with_an_empty_schema(callers: dict[str, Caller]) -> None:
    """An empty schema does not make other JSON out of a JSON object."""
    given = {"response_format": {"type": "json_object", "schema": {}}, "max_tokens": 3, "temperature": 0}
    assert Way(callers["sync"], is_streamed=False).chat(messages=ASK, extra_body=given).text.startswith("{")


def test_a_form_is_given_once(callers: dict[str, Caller]) -> None:
    """Two fields for the form contradict each other, and beams take none."""
    with pytest.raises(openai.BadRequestError, match="guided_regex cannot be combined with response_format"):
        callers["sync"].client.chat.completions.create(
            model=MODEL, messages=ASK, response_format={"type": "json_object"}, extra_body={"guided_regex": "a"}
        )
    with pytest.raises(openai.BadRequestError, match="cannot be combined with use_beam_search"):
        callers["sync"].client.chat.completions.create(
            model=MODEL, messages=ASK, n=2, extra_body={"guided_regex": "ab", "use_beam_search": True}
        )


def test_metrics_count_grammars(server: Server) -> None:
    """/metrics has the counts of grammars, and no violation."""
    body = {"model": MODEL, "messages": ASK, "guided_choice": ["up", "down"]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    lines = server.http.get("/metrics").text.splitlines()
    counts = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("pagewick:")}
    assert counts["pagewick:constrained_requests_total"] >= 1 and counts["pagewick:grammars_compiled_total"] >= 1
    assert counts["pagewick:grammar_masks_total"] >= 1 and counts["pagewick:grammar_violations_total"] == 0
