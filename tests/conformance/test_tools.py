"""Points 60 to 68: tools, with the built-in model, whose calls need not be the right ones except where that is said."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.conformance.callers import Caller, Choice, Way, user
from tests.conformance.servers import MODEL
from tests.conformance.test_chat import refused

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
NOTHING: dict[str, Any] = {"name": "get_date", "description": "Get today's date."}
KEYS = {"get_weather": {"city"}, "add": {"a", "b"}, "get_date": set()}
QUESTION = [user("what is the weather in Rome?")]


def tools(*functions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": one} for one in functions]


ALL = tools(WEATHER, ADD, NOTHING)


def called(way: Way, **fields: Any) -> Choice:
    """A response to the question, with calls that fit their schemas, if there are any."""
    response = way.chat(**{"messages": QUESTION, "tools": ALL, "temperature": 0, "max_tokens": 100, **fields})
    (choice,) = response.choices
    for call in choice.calls:
        assert json.loads(call.arguments).keys() == KEYS[call.name]
    if choice.finish_reason == "stop":
        assert not choice.calls
    return choice


@pytest.mark.parametrize("text", ["hello", "what is 2 plus 3?", "Repeat xqz"])
def test_point_60_required(way: Way, text: str) -> None:
    """A required call comes whatever is asked: its arguments fit the schema, and there is no content."""
    choice = called(way, messages=[user(text)], tool_choice="required", parallel_tool_calls=False)
    assert choice.finish_reason == "tool_calls" and len(choice.calls) == 1 and not choice.text


def test_point_60_a_call_that_is_cut_off(way: Way) -> None:
    """A call that max_tokens cuts is reported as far as it goes, with the finish reason length."""
    response = way.chat(messages=QUESTION, tools=ALL, tool_choice="required", temperature=0, max_tokens=15)
    (choice,) = response.choices
    assert choice.finish_reason == "length" and not choice.text
    (call,) = choice.calls
    assert call.name == "get_weather" and '{"city": "Rome"}'.startswith(call.arguments)


def test_point_60_several_choices(way: Way) -> None:
    """Each choice has calls of its own, with ids of their own and log-probabilities only for content."""
    response = way.chat(messages=QUESTION, tools=ALL, tool_choice="required", n=3, temperature=1, max_tokens=200,
                        parallel_tool_calls=False, logprobs=True, top_logprobs=1)  # fmt: skip
    ids = [call.id for choice in response.choices for call in choice.calls]
    assert len(response.choices) == 3 == len({*ids})
    for choice in response.choices:
        assert choice.finish_reason in ("tool_calls", "length") and not choice.text and not choice.logprobs


@pytest.mark.parametrize("name", ["get_weather", "add", "get_date"])
def test_point_61_named(way: Way, name: str) -> None:
    """A named function is called once, and no other one; the finish reason is tool_calls."""
    choice = called(way, tool_choice={"type": "function", "function": {"name": name}})
    assert [call.name for call in choice.calls] == [name] and choice.finish_reason == "tool_calls"


def test_point_61_allowed_tools(way: Way) -> None:
    """The model calls only the allowed tools among several."""
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice = called(way, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, parallel_tool_calls=False)
    assert [call.name for call in choice.calls] == ["add"]


def test_point_62_none(way: Way) -> None:
    """With none there is text, and no call."""
    choice = called(way, tool_choice="none")
    assert choice.text and not choice.calls and choice.finish_reason in ("stop", "length")
    assert choice.text == way.chat(messages=QUESTION, temperature=0, max_tokens=100).text


def test_point_63_auto(way: Way) -> None:
    """The model decides; a response without a call has no tool_calls and finishes with stop."""
    assert [call.name for call in called(way, tools=tools(WEATHER)).calls] == ["get_weather"]
    answered = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call_of("1", "get_weather", {"city": "Rome"})]},
        {"role": "tool", "tool_call_id": "1", "content": '{"condition": "sunny", "temperature": 21}'},
    ]
    choice = called(way, tools=tools(WEATHER), messages=answered)
    assert choice.finish_reason == "stop" and choice.text


def test_point_64_streamed_calls(caller: Caller) -> None:
    """The client accumulates the same calls as without a stream; id, type and name come once."""
    # A bias against the end makes the model write two calls.
    fields = {"messages": QUESTION, "tools": ALL, "tool_choice": "required", "temperature": 0, "max_tokens": 100,
              "extra_body": {"min_tokens": 30}}  # fmt: skip
    (whole,) = caller.chat(**fields).choices
    (made,) = caller.accumulated(**fields).choices
    assert whole.message.tool_calls and made.message.tool_calls
    found = [[(one.type, one.function.name, one.function.arguments) for one in choice.message.tool_calls or []]
             for choice in (whole, made)]  # fmt: skip
    assert found[0] == found[1] and whole.finish_reason == made.finish_reason
    assert whole.message.content is None and made.message.content is None
    pieces = [
        call
        for chunk in caller.chat_chunks(**fields)
        for call in (chunk.choices[0].delta.tool_calls or [] if chunk.choices else [])
    ]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    num_calls = len(whole.message.tool_calls)
    assert num_calls > 1
    assert sum(piece.id is not None for piece in pieces) == num_calls <= len(pieces)
    assert sum(piece.function is not None and piece.function.name is not None for piece in pieces) == num_calls


def test_point_64_models_of_arguments(caller: Caller) -> None:
    """The client makes the arguments of strict tools into pydantic models, streamed or not."""

    class Weather(BaseModel):
        """Get the weather of a city."""

        # At temperature 1 the model might not end a string before max_tokens.
        city: Annotated[str, Field(max_length=40)]
        unit: Literal["celsius", "fahrenheit"]
        days: int | None

    fields = {"messages": QUESTION, "tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required",
              "temperature": 1, "seed": 1, "max_tokens": 300, "parallel_tool_calls": False}  # fmt: skip
    for response in (caller.parsed(**fields), caller.accumulated(**fields)):
        (call,) = response.choices[0].message.tool_calls
        assert call.function.name == "Weather" and isinstance(call.function.parsed_arguments, Weather)


def test_point_64_events(caller: Caller) -> None:
    """The client's stream helper reports the arguments while they grow, and once when they are complete."""
    # A busy server may send several tokens in one event, so the arguments are long: several hundred tokens.
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    numbers = {"type": "array", "items": digit, "minItems": 200, "maxItems": 200}
    function = {**ADD, "parameters": {**ADD["parameters"], "properties": {"numbers": numbers}, "required": ["numbers"]}}
    asked = {"tools": tools({**function, "strict": True}), "tool_choice": "required", "parallel_tool_calls": False}
    stream = caller.client.chat.completions.stream(
        model=MODEL, messages=[user("add 2 and 3")], temperature=0, max_tokens=1000, **asked
    )
    events = caller.events(stream)
    assert "content.delta" not in [event.type for event in events]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert "".join(delta.arguments_delta for delta in deltas) == done.arguments
    assert len(json.loads(done.arguments)["numbers"]) == 200
    assert len(deltas) > 1


def test_point_65_parallel_calls(way: Way) -> None:
    """A response may have several calls, each with its id and index; parallel_tool_calls: false allows one."""
    choice = called(way, tools=tools(NOTHING), tool_choice="required", logit_bias={"2": -100}, max_tokens=60)
    assert len(choice.calls) > 1 and len({call.id for call in choice.calls}) == len(choice.calls)
    choice = called(
        way, tools=tools(NOTHING), tool_choice="required", logit_bias={"2": -100}, parallel_tool_calls=False
    )
    assert len(choice.calls) == 1 and choice.finish_reason == "tool_calls"


def test_point_66_a_tools_result(way: Way) -> None:
    """The model calls a tool, and its next response uses the result."""
    (call,) = called(way, tools=tools(WEATHER), parallel_tool_calls=False).calls
    assert json.loads(call.arguments) == {"city": "Rome"}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call_of(call.id, call.name, json.loads(call.arguments))]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"condition": "windy", "temperature": 7}'},
    ]
    choice = called(way, tools=tools(WEATHER), messages=messages)
    assert "windy" in choice.text and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_call_id": "call_2"}, "messages[2].tool_call_id"),
        ({"tool_call_id": 1}, "messages[2].tool_call_id"),
        ({"tool_call_id": None}, "messages[2].tool_call_id"),
        ({"role": "user", "content": "Well?"}, "messages[3].tool_call_id"),
    ],
    ids=str,
)
def test_point_66_results_without_their_call(caller: Caller, change: dict[str, Any], param: str) -> None:
    """A result that does not follow its call is refused, with the message's place."""
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It is here."}
    messages = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call_of("call_1", "add", {"a": 1})]},
        {**result, **change},
    ]
    refused(Way(caller, is_streamed=False), param, messages=[*messages, result], tools=ALL)


def test_point_66_a_result_without_an_id(caller: Caller) -> None:
    """OpenAI's API requires the id of a result, also where no call is above it."""
    refused(
        Way(caller, is_streamed=False),
        "messages[0].tool_call_id",
        messages=[{"role": "tool", "content": "x"}, *QUESTION],
    )


def test_point_67_a_tool_without_arguments(way: Way) -> None:
    """A tool without parameters is called with an empty object."""
    for function in (NOTHING, {**NOTHING, "parameters": {}}, {**NOTHING, "parameters": {"type": "object"}}):
        choice = called(way, tools=tools(function), tool_choice="required", parallel_tool_calls=False)
        assert [call.arguments for call in choice.calls] == ["{}"]


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "array"}, "tools[0].function.parameters.type"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "tools[0].function.parameters.properties.a.type"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}, "tools"),
    ],
    ids=str,
)
def test_point_68_wrong_schemas(caller: Caller, schema: dict[str, Any], param: str) -> None:
    """A tool with a wrong schema is refused before anything is generated."""
    refused(Way(caller, is_streamed=True), param, tools=tools({"name": "look", "parameters": schema}))


def test_point_68_former_fields(caller: Caller) -> None:
    """Clients that know only functions get a function_call."""
    fields = {"messages": QUESTION, "functions": [WEATHER], "temperature": 0, "max_tokens": 100}
    (choice,) = caller.chat(**fields, function_call={"name": "get_weather"}).choices
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call is not None and choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments).keys() == {"city"}


def call_of(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
