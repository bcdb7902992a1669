"""Points 81 and 82: the Responses API, with the built-in model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.conformance.callers import Caller, error_of
from tests.conformance.servers import MODEL, Server
from tests.conformance.shapes import check_response, check_response_event, strictly_parsed
from tests.conformance.test_tools import WEATHER

WEATHER_TOOL: dict[str, Any] = {"type": "function", **WEATHER}
QUESTION = "what is the weather in Rome?"
WINDY = '{"condition": "windy", "temperature": 7}'
PATH = "/v1/responses"
# The default on a CPU.
BLOCK_SIZE = 32


@dataclass
class Asking:
    """One of the four ways to get a response: sync or async, streamed or not."""

    caller: Caller
    is_streamed: bool

    def __call__(self, **fields: Any) -> Any:
        """Return the response; of a stream, the one in its last event."""
        fields = {"model": MODEL, "temperature": 0, "max_output_tokens": 100, **fields}
        if not self.is_streamed:
            return self.caller.call("responses.create", **fields)
        *_, last = self.caller.collected("responses.create", stream=True, **fields)
        assert last.type == f"response.{last.response.status}"
        return last.response


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(request: pytest.FixtureRequest, caller: Caller) -> Asking:
    return Asking(caller, request.param)


def test_point_81_responses(ask: Asking) -> None:
    """A response has one message, as the same chat has, and a usage that sums up and counts its prompt."""
    response = ask(input="how do I change the port?", instructions="Be brief.")
    (item,) = response.output
    assert (item.type, item.role, item.status, response.status) == ("message", "assistant", "completed", "completed")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "how do I change the port?"}]
    chat = ask.caller.chat(messages=messages, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    counted = ask.caller.call(
        "responses.input_tokens.count", model=MODEL, input="how do I change the port?", instructions="Be brief."
    )
    assert counted.input_tokens == usage.input_tokens


def test_point_81_shape(server: Server) -> None:
    """Responses and events have the shape of OpenAI's types, log-probabilities and calls included."""
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for more in ({}, logprobs, {"tools": [WEATHER_TOOL], "tool_choice": "required"}, {"max_output_tokens": 3}):
        body = {"input": QUESTION, "temperature": 0, "max_output_tokens": 60, **more}
        check_response(server.http.post(PATH, json=body).content)
        for block in server.http.post(PATH, json={**body, "stream": True}).text.strip().split("\n\n"):
            name, data = block.split("\n")
            check_response_event(data.removeprefix("data: "))
            assert name == f"event: {strictly_parsed(data.removeprefix('data: '))['type']}"


def test_point_81_events(caller: Caller) -> None:
    """The events come in order, with numbers that grow, and the client's stream helper accepts them."""
    fields: dict[str, Any] = {"model": MODEL, "input": "what is 2 plus 3?", "temperature": 0}
    events = caller.collected("responses.create", stream=True, **fields)
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == events[-4].text
    helped = caller.events(caller.client.responses.stream(**fields))
    assert helped[-1].type == "response.completed" and helped[-1].response.output_text == text


def test_point_81_parse(caller: Caller) -> None:
    """The client makes the text and the arguments of calls into pydantic models, streamed or not."""

    class Answer(BaseModel):
        # Within bounds, since the model might go on with a number up to the end of the context.
        port: Annotated[int, Field(ge=1, le=65535)]

    fields: dict[str, Any] = {"model": MODEL, "input": "Which port?", "text_format": Answer, "temperature": 0}
    parsed = caller.call("responses.parse", **fields)
    assert isinstance(parsed.output_parsed, Answer)
    last = caller.events(caller.client.responses.stream(**fields))[-1]
    assert last.response.output_parsed == parsed.output_parsed
    tools = [openai.pydantic_function_tool(Answer)]
    called = caller.call(
        "responses.parse",
        model=MODEL,
        input="Which port?",
        tools=tools,
        tool_choice="required",
    )
    (call, *_) = called.output
    assert isinstance(call.parsed_arguments, Answer)


def test_point_81_a_response_that_is_cut_off(ask: Asking) -> None:
    """A response that max_output_tokens cuts is incomplete, and says why."""
    response = ask(input="how do I change the port?", max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3 and response.output[-1].status == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[0].content[0].type"),
    ],
    ids=str,
)  # fmt: skip
def test_point_81_what_is_refused(ask: Asking, fields: dict[str, Any], param: str) -> None:
    """The server names each feature that it refuses, streamed or not."""
    with pytest.raises(openai.BadRequestError) as failure:
        ask(**{"input": "x", **fields})
    assert error_of(failure.value)["param"] == param


def test_point_82_chains(ask: Asking) -> None:
    """A response goes on from a stored one: the prompt is the whole conversation, and its beginning is cached."""
    first = ask(input="how do I change the port?")
    second = ask(input="and the host?", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "how do I change the port?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and the host?"},
    ]
    chat = ask.caller.chat(messages=messages, temperature=0, max_tokens=100)
    assert (second.output_text, second.usage.input_tokens) == (
        chat.choices[0].message.content,
        chat.usage.prompt_tokens,
    )
    assert second.previous_response_id == first.id
    third = ask(input="thanks", previous_response_id=second.id)
    # Whole blocks are cached; the end of a response never is.
    assert third.usage.input_tokens_details.cached_tokens >= second.usage.input_tokens // BLOCK_SIZE * BLOCK_SIZE > 0


def test_point_82_a_tools_result(ask: Asking) -> None:
    """The model calls a function, and goes on with its result: by the id of the response, or with all items."""
    first = ask(input=QUESTION, tools=[WEATHER_TOOL])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WINDY}
    chained = ask(input=[result], tools=[WEATHER_TOOL], previous_response_id=first.id)
    items = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    whole = ask(input=items, tools=[WEATHER_TOOL], store=False)
    referred = ask(
        input=[items[0], {"type": "item_reference", "id": call.id}, result], tools=[WEATHER_TOOL], store=False
    )
    assert "windy" in chained.output_text
    assert chained.output_text == whole.output_text == referred.output_text
    assert chained.usage.input_tokens == whole.usage.input_tokens == referred.usage.input_tokens


def test_point_82_stored_responses(ask: Asking) -> None:
    """A stored response can be read with its items, and deleted; then it is not found."""
    first = ask(input="hello")
    second = ask(input="how do I change the port?", previous_response_id=first.id)
    caller = ask.caller
    assert caller.call("responses.retrieve", second.id).output_text == second.output_text
    items = caller.call("responses.input_items.list", second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].id == first.output[0].id and items[2].content[0].text == "how do I change the port?"
    caller.call("responses.delete", first.id)
    for call in (
        lambda: caller.call("responses.retrieve", first.id),
        lambda: caller.call("responses.delete", first.id),
        lambda: caller.call("responses.input_items.list", first.id).data,
        lambda: ask(input="x", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no stored response"):
            call()
    # The second one does not need it.
    assert ask(input="thanks", previous_response_id=second.id).status in ("completed", "incomplete")


def test_point_82_store_false(ask: Asking) -> None:
    """With store: false nothing is kept, and the error says so."""
    response = ask(input="hello", store=False)
    with pytest.raises(openai.NotFoundError, match="it was not stored") as failure:
        ask(input="and?", previous_response_id=response.id)
    assert error_of(failure.value)["code"] == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError, match="it was not stored"):
        ask.caller.call("responses.retrieve", response.id)
