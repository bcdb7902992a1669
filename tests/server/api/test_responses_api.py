"""The Responses API over a fake engine: its objects, its events, its stored responses and its errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pagewick.server.api.responses_api.items import decoded_thoughts, encoded_thoughts
from tests.fake_engine import DEATH, NAN_ROW
from tests.server.api.test_thinking import ThinkingClient
from tests.server.api_routes import Api, error_of
from tests.server.conftest import MODEL, Server

RESPONSES = "/v1/responses"
ARGUMENTS = '{"at": "é"}'
WRITTEN = f'<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
USER = {"role": "user", "content": "a"}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def api_writing(text: str, **settings: Any) -> Api:
    api = Api(**settings)
    api.client = ThinkingClient()
    api.client.texts = [text]
    return api


def answered(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.post(RESPONSES, **{"input": "hi", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Response.model_validate(body, strict=True)
    return body


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def streamed(api: Api, **fields: Any) -> list[dict[str, Any]]:
    events = events_of(api.post(RESPONSES, **{"input": "hi", "stream": True, **fields}))
    for event in events:
        EVENT.validate_python(event)
    return events


def without_ids(value: Any) -> Any:
    """Leave out what differs between two responses to the same request."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        dropped = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(one) for name, one in value.items() if name not in dropped}
    return value


def test_a_response_has_items_in_the_order_in_which_they_were_written() -> None:
    body = answered(api_writing(WRITTEN), tools=[LOOK])
    thoughts, message, call = body["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}] and thoughts["summary"] == []
    assert thoughts["encrypted_content"] is None
    assert message["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    assert (call["name"], call["arguments"]) == ("look", ARGUMENTS)
    assert call["call_id"] != call["id"]
    assert {item["status"] for item in body["output"]} == {"completed"} == {body["status"]}
    assert [item["id"].partition("_")[0] for item in body["output"]] == ["rs", "msg", "fc"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]


def test_a_response_repeats_its_request() -> None:
    body = answered(
        Api(), instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50, temperature=0.5, top_p=0.25,
        tools=[LOOK], tool_choice="none", parallel_tool_calls=False, text={"format": {"type": "text"}}, store=False,
        reasoning={"effort": "none"}, user="u", safety_identifier="s", prompt_cache_key="p", max_tool_calls=3,
    )  # fmt: skip
    assert body["tools"] == [{**LOOK, "description": None, "strict": None}] and body["tool_choice"] == "none"
    repeated = {name: body[name] for name in ("instructions", "metadata", "max_output_tokens", "temperature", "top_p")}
    assert repeated == {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50,
                        "temperature": 0.5, "top_p": 0.25}  # fmt: skip
    assert (body["parallel_tool_calls"], body["store"], body["background"]) == (False, False, False)
    assert (body["user"], body["safety_identifier"], body["prompt_cache_key"]) == ("u", "s", "p")
    assert body["reasoning"] == {"effort": "none", "summary": None} and body["max_tool_calls"] == 3


@pytest.mark.parametrize("text", [WRITTEN, "Hello 😀!", "<think>\nHm.\n</think>\n\n", "", WRITTEN + "\nAnd more."])
def test_a_stream_ends_with_the_response_that_is_sent_without_one(text: str) -> None:
    api = api_writing(text)
    events = streamed(api, tools=[LOOK])
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(answered(api, tools=[LOOK]))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and done


def test_the_events_of_an_item_stand_between_its_beginning_and_its_end() -> None:
    events = streamed(api_writing(WRITTEN), tools=[LOOK])
    kinds = [event["type"].removeprefix("response.") for event in events]
    merged = [kind for place, kind in enumerate(kinds) if kind != (kinds[place - 1] if place else None)]
    part = ["content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
    assert merged == [
        "created", "in_progress",
        "output_item.added", *(kind.format("reasoning_text") for kind in part), "output_item.done",
        "output_item.added", *(kind.format("output_text") for kind in part), "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for word, whole in (("reasoning_text", "Hm."), ("output_text", "I look."), ("function_call_arguments", ARGUMENTS)):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{word}.delta"]
        assert "".join(deltas) == whole and all(deltas)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert added[1]["content"] == [] and added[2]["arguments"] == "" and added[2]["name"] == "look"
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices) and set(indices) == {0, 1, 2}


@pytest.mark.parametrize("num_tokens", [4, 8])
def test_a_response_that_is_cut_off_is_incomplete(num_tokens: int) -> None:
    api = api_writing("<think>\nHm.\n</think>\n\nHello")
    body = answered(api, max_output_tokens=num_tokens)
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete" and body["completed_at"] is None
    last = streamed(api, max_output_tokens=num_tokens)[-1]
    assert last["type"] == "response.incomplete" and without_ids(last["response"]) == without_ids(body)


def test_logprobs_are_those_of_the_text() -> None:
    api = api_writing("Hello 😀!")
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = answered(api, **wanted)["output"][0]["content"]
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == "Hello 😀!"
    assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}
    events = streamed(api, **wanted)
    deltas = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert part["logprobs"] == done["logprobs"] and deltas == part["logprobs"][: len(deltas)] and deltas


def test_an_error_before_the_first_token_has_its_own_status() -> None:
    for is_streamed in (False, True):
        api = Api()
        api.client.pause_at, api.client.failure = 0, DEATH
        assert error_of(api.post(RESPONSES, input="hi", stream=is_streamed), 503)["code"] == "engine_dead"


def test_an_error_in_a_stream_ends_it_with_the_failed_response() -> None:
    api = api_writing("Hello")
    api.client.pause_at, api.client.failure = 1, NAN_ROW
    api.client.texts = ["Hello there"]

    async def work(http: httpx.AsyncClient) -> None:
        events = events_of(await http.post(RESPONSES, json={"input": "hi", "stream": True}))
        failed, told = events[-2:]
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"] == {"code": "server_error", "message": str(NAN_ROW)}
        (item,) = failed["response"]["output"]
        assert item["status"] == "incomplete" and item["content"][0]["text"]
        assert told["type"] == "error" and told["message"] == told["error"]["message"] == str(NAN_ROW)
        gone = await http.get(f"{RESPONSES}/{events[0]['response']['id']}")
        assert error_of(gone, 404)["code"] == "response_not_found"

    api.run(work)


def test_the_official_client_raises_an_error_in_a_stream(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.pause_at, server.engine_client.failure = 3, NAN_ROW
    seen = []
    with pytest.raises(openai.APIError, match="the model gave no number"):
        for event in sdk.responses.create(model=MODEL, input="hi", stream=True):
            seen.append(event.type)
    assert seen[0] == "response.created" and seen[-1] == "response.failed"


def test_a_client_that_leaves_frees_its_request_and_nothing_is_stored(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.pause_at = 4
    stream = sdk.responses.create(model=MODEL, input="hi", stream=True)
    created: Any = next(iter(stream))
    stream.close()
    server.until(lambda: len(server.engine_client.aborted) == 1)
    with pytest.raises(openai.NotFoundError, match="there is no stored response"):
        sdk.responses.retrieve(created.response.id)


Work = Callable[[httpx.AsyncClient], Awaitable[None]]


def test_a_response_goes_on_from_a_stored_one() -> None:
    api = api_writing(WRITTEN)

    async def work(http: httpx.AsyncClient) -> None:
        first = (await http.post(RESPONSES, json={"input": "hi", "instructions": "One.", "tools": [LOOK]})).json()
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "a door"}
        body = {"input": [result], "previous_response_id": first["id"], "instructions": "Two.", "tools": [LOOK]}
        second = (await http.post(RESPONSES, json=body)).json()
        assert second["previous_response_id"] == first["id"]
        # It does not need the first one any more.
        assert (await http.delete(f"{RESPONSES}/{first['id']}")).json()["deleted"] is True
        api.client.texts = ["Done."]
        call = second["output"][-1]["call_id"]
        news = [{**result, "call_id": call}, {"role": "user", "content": "So?"}]
        third = await http.post(RESPONSES, json={"input": news, "previous_response_id": second["id"], "store": False})
        assert third.status_code == 200, third.text
        items = (await http.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()
        kinds = [item["type"] for item in items["data"]]
        assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
        gone = await http.get(f"{RESPONSES}/{third.json()['id']}")
        assert "it was not stored" in error_of(gone, 404)["message"]

    api.run(work)
    called = f'\n<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
    assert "One." not in api.prompt and "Two." not in api.prompt
    assert api.prompt.count(called) == 2 and api.prompt.count("a door") == 2 and "So?" in api.prompt


def test_a_chain_renders_the_same_text_as_the_whole_conversation() -> None:
    api = Api()

    async def work(http: httpx.AsyncClient) -> None:
        first = (await http.post(RESPONSES, json={"input": "hi"})).json()
        await http.post(RESPONSES, json={"input": "more", "previous_response_id": first["id"]})

    api.run(work)
    chained = api.prompt
    api.chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello 😀!"},
                       {"role": "user", "content": "more"}])  # fmt: skip
    assert api.prompt == chained


def test_a_conversation_has_as_many_items_as_a_request() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        # An item that renders to nothing: the fake engine's context is short.
        nothing = {"type": "reasoning", "summary": []}
        first = (await http.post(RESPONSES, json={"input": [*[nothing] * 2000, USER]})).json()
        body = {"input": [nothing] * 100, "previous_response_id": first["id"]}
        error = error_of(await http.post(RESPONSES, json=body))
        assert error["param"] == "input" and "at most 2048 items" in error["message"]

    Api().run(work)


def test_keys_do_not_see_each_others_responses() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        mine, other = {"x-test-key": "a"}, {"x-test-key": "b"}
        body = (await http.post(RESPONSES, json={"input": "hi"}, headers=mine)).json()
        path, reference = f"{RESPONSES}/{body['id']}", {"type": "item_reference", "id": body["output"][0]["id"]}
        for answer, code in (
            (await http.get(path, headers=other), "response_not_found"),
            (await http.delete(path, headers=other), "response_not_found"),
            (await http.get(f"{path}/input_items", headers=other), "response_not_found"),
            (await http.post(RESPONSES, json={"input": [reference]}, headers=other), "item_not_found"),
            (await http.post(RESPONSES, json={"input": "x", "previous_response_id": body["id"]}, headers=other),
             "previous_response_not_found"),
        ):  # fmt: skip
            assert error_of(answer, 404)["code"] == code
        assert (await http.get(path, headers=mine)).json() == body
        assert (await http.post(RESPONSES, json={"input": [reference]}, headers=mine)).status_code == 200

    Api().run(work)


def test_input_items_come_in_pages() -> None:
    async def work(http: httpx.AsyncClient) -> None:
        given = [{"role": "user", "content": f"{place}"} for place in range(5)]
        body = (await http.post(RESPONSES, json={"input": given})).json()
        path, seen, after = f"{RESPONSES}/{body['id']}/input_items", [], ""
        while True:
            page = (await http.get(path, params={"limit": 2, **({"after": after} if after else {})})).json()
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            seen += [item["content"][0]["text"] for item in page["data"]]
            after = page["last_id"]
            if not page["has_more"]:
                break
        assert seen == ["4", "3", "2", "1", "0"]
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            assert error_of(await http.get(f"{path}?{query}"))["param"] == param
        assert error_of(await http.get(f"{RESPONSES}/{body['id']}?stream=true"))["param"] == "stream"
        answer = await http.get(f"{RESPONSES}/{body['id']}?include=x")
        assert answer.headers["x-pagewick-ignored"] == "include"

    Api().run(work)


def test_tokens_are_counted_as_a_response_counts_them() -> None:
    api = api_writing("Hello")
    fields = {"input": "hi", "instructions": "Be brief.", "tools": [LOOK], "reasoning": {"effort": "none"}}
    counted = api.post(f"{RESPONSES}/input_tokens", **fields).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    num_requests = len(api.client.requests)
    assert answered(api, **fields)["usage"]["input_tokens"] == counted["input_tokens"] and num_requests == 0


def test_thoughts_come_back_in_either_field() -> None:
    api = api_writing("<think>\nHm é.\n</think>\n\nHello")
    body = answered(api, include=["reasoning.encrypted_content"])
    encoded = body["output"][0]["encrypted_content"]
    assert decoded_thoughts(encoded) == "Hm é." and encoded == encoded_thoughts("Hm é.")
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    after = [said, call, {"type": "function_call_output", "call_id": "1", "output": "x"}]
    prompts = set()
    for thoughts in ({"encrypted_content": encoded}, {"content": [{"type": "reasoning_text", "text": "Hm é."}]}):
        answered(api, input=[asked, {"type": "reasoning", "summary": [], **thoughts}, *after])
        prompts.add(api.prompt)
    assert len(prompts) == 1 and "Hm é." in prompts.pop()


def test_instructions_and_the_first_messages_are_one_system_message() -> None:
    api = Api()
    answered(api, instructions="A.", input=[{"role": "developer", "content": "B."}, {"role": "user", "content": "C."}])
    assert "system\nA.\n\nB.<|im_end|>" in api.prompt and api.prompt.count("system") == 1


NAMESPACE: dict[str, Any] = {
    "type": "namespace", "name": "house", "description": "What one does in a house.",
    "tools": [{"type": "function", "name": "enter", "description": "Go in."}, {"type": "function", "name": "leave"}],
}  # fmt: skip


def test_functions_of_a_namespace_have_longer_names_for_the_model_only() -> None:
    api = api_writing('<tool_call>\n{"name": "house__leave", "arguments": {}}\n</tool_call>')
    body = answered(api, tools=[LOOK, NAMESPACE])
    (call,) = body["output"]
    assert (call["namespace"], call["name"]) == ("house", "leave")
    functions = [{"parameters": None, "strict": None, "description": None, **one} for one in NAMESPACE["tools"]]
    assert body["tools"][1] == {**NAMESPACE, "tools": functions}
    assert '"house__enter"' in api.prompt and "What one does in a house.\\n\\nGo in." in api.prompt
    (done,) = [one for one in streamed(api, tools=[NAMESPACE]) if one["type"] == "response.output_item.done"]
    assert (done["item"]["namespace"], done["item"]["name"]) == ("house", "leave")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    answered(api, input=[USER, {"role": "assistant", "content": "b"}, call, result], tools=[NAMESPACE])
    assert '{"name": "house__leave", "arguments": {}}' in api.prompt
    choice = {"type": "function", "namespace": "house", "name": "leave"}
    answered(api, tools=[NAMESPACE], tool_choice=choice)
    assert "house__enter" not in str(api.client.requests[-1].constraint)
    wrong = {**NAMESPACE, "tools": [NAMESPACE["tools"][0], {"type": "function", "name": "a b"}]}
    error = error_of(api.post(RESPONSES, input="hi", tools=[LOOK, wrong]))
    assert error["param"] == "tools[1].tools[1].name"
    error = error_of(api.post(RESPONSES, input="hi", tools=[{**NAMESPACE, "tools": [{"type": "custom", "name": "x"}]}]))
    assert error["param"] == "tools[0].tools[0].type"


@pytest.mark.parametrize(
    ("choice", "names", "is_required"),
    [
        ({"type": "function", "name": "look"}, "look", True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}, "look", False),
        ("required", "look", True),
    ],
)
def test_choices_of_tools(choice: Any, names: str, is_required: bool) -> None:
    api = api_writing("Hello")
    answered(api, tools=[LOOK], tool_choice=choice)
    constraint = str(api.client.requests[-1].constraint)
    assert names in constraint
    answered(api, tools=[LOOK])
    assert (str(api.client.requests[-1].constraint) != constraint) == is_required


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "missing or empty"),
        ({"input": None}, "input", "missing or empty"),
        ({"background": True}, "background", "stream the response"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"messages": []}, "messages", "send input"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"guided_json": {}}, "guided_json", "not supported"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "needs a schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format", "Invalid type: x"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [{**LOOK, "parameters": {"type": "array"}}]}, "tools[0].parameters.type", "must be 'object'"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice", "only functions"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"include": ["thoughts"]}, "include", "'thoughts'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"temperature": 3}, "temperature", "temperature"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "accepted: high"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(Api().post(RESPONSES, **{"input": "hi", **fields}))
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "web_search_call", "id": "x"}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0]"),
        ({"type": "function_call", "call_id": "1", "name": "f"}, "input[1].arguments"),
        ({"type": "reasoning", "encrypted_content": "gAAAAA"}, "input[1].encrypted_content"),
        ({"type": "reasoning", "encrypted_content": "pagewick:é"}, "input[1].encrypted_content"),
        ({"type": "item_reference"}, "input[1].id"),
    ],
    ids=str,
)
def test_wrong_items_are_named(item: dict[str, Any], param: str) -> None:
    error = error_of(Api().post(RESPONSES, input=[USER, item, USER]))
    assert error["param"] == param and param in error["message"], error


def test_a_result_needs_its_call() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "2", "output": "x"}
    error = error_of(Api().post(RESPONSES, instructions="A.", input=[USER, call, result]))
    assert error["param"] == "input[2].call_id" and "input[2].call_id" in error["message"]


def test_fields_without_effect_are_named() -> None:
    fields = {
        "input": [{**USER, "color": "red", "status": "completed"}], "reasoning": {"summary": "auto"}, "shape": 1,
        "client_metadata": {"a": "b"}, "text": {"format": {"type": "text", "size": 2}},
    }  # fmt: skip
    named = Api().post(RESPONSES, **fields).headers["x-pagewick-ignored"]
    assert named == "shape, input[].color, text.format.size, reasoning.summary"
    assert error_of(Api(strict=True).post(RESPONSES, **fields))["code"] == "unknown_parameter"
    plain = Api(strict=True).post(RESPONSES, input=[USER], service_tier="auto", include=["file_search_call.results"])
    assert plain.status_code == 200 and "x-pagewick-ignored" not in plain.headers
