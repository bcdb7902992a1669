"""Behaviour that is known to have broken clients of other servers (tools, structured output and embeddings aside)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from tests.conformance.callers import Caller, Way, error_of, user
from tests.conformance.conftest import KEY
from tests.conformance.servers import MODEL, Server, until

CHAT = "/v1/chat/completions"
QUESTION = [user("Which port does the server listen on by default?")]


def test_breakage_usage_chunk_without_include_usage(caller: Caller) -> None:
    """Clients take choices[0] of every chunk."""
    for chunk in caller.chat_chunks(max_tokens=3):
        assert chunk.choices[0].index == 0 and chunk.usage is None
    for chunk in caller.completion_chunks(prompt="Hi", max_tokens=3):
        assert chunk.choices[0].index == 0 and chunk.usage is None


def test_breakage_role_in_every_chunk(caller: Caller) -> None:
    """Clients join the strings of deltas: a repeated role becomes assistantassistant."""
    role = "".join(chunk.choices[0].delta.role or "" for chunk in caller.chat_chunks(max_tokens=4))
    assert role == "assistant"
    made = caller.accumulated(messages=QUESTION, temperature=0)
    assert made.choices[0].message.role == "assistant"


def test_breakage_first_chunk_without_a_role(server: Server) -> None:
    """Clients look for the role in the very first event, with a content that is a string."""
    with server.http.stream("POST", CHAT, json={"messages": QUESTION, "stream": True, "max_tokens": 1}) as response:
        first = next(line for line in response.iter_lines() if line)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_breakage_role_developer(way: Way) -> None:
    """Newer clients say developer where older ones say system, also in the middle of a conversation."""
    messages = [user("Hi"), {"role": "developer", "content": "Be brief."}, *QUESTION]
    assert way.chat(messages=messages, max_tokens=2).finish_reason == "length"


def test_breakage_bias_of_a_token_that_does_not_exist(way: Way, server: Server) -> None:
    """Such a bias must not reach the model, where it would harm other requests."""
    before = way.chat(messages=QUESTION, temperature=0).text
    for key in ("4096", "151936", "-1", str(2**31), str(2**63)):
        with pytest.raises(openai.BadRequestError):
            way.chat(logit_bias={key: 100})
    assert way.chat(messages=QUESTION, temperature=0).text == before
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [user("Hi"), {"role": "assistant", "content": []}, *QUESTION],
        [user("Hi"), {"role": "assistant", "content": "A", "tool_calls": None, "function_call": None}, *QUESTION],
        [user("Hi"), {"role": "assistant", "content": None, "refusal": None, "audio": None}, *QUESTION],
        [{"role": "tool", "tool_call_id": "call_1", "content": "an orphan"}, *QUESTION],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"}, *QUESTION],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": ""}],
    ],
    ids=str,
)
def test_breakage_messages_that_clients_send(server: Server, messages: list[dict[str, Any]]) -> None:
    """Agents send messages with empty parts, null calls, and results of calls that were cut off."""
    response = server.http.post(CHAT, json={"model": MODEL, "messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text


def test_breakage_created_in_milliseconds(caller: Caller) -> None:
    """Clients read created as seconds, everywhere."""
    found = [caller.chat(max_tokens=1).created, caller.chat_chunks(max_tokens=1)[0].created, caller.models()[0].created]
    assert all(10**9 < created < 10**10 for created in found)


def test_breakage_error_outside_of_error(server: Server) -> None:
    """Clients look for the message in body.error.message."""
    for response in (server.http.post(CHAT, content="{"), server.http.get("/none"), server.http.get(CHAT)):
        assert list(response.json()) == ["error"] and isinstance(response.json()["error"]["message"], str)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_breakage_response_format_that_is_ignored(way: Way, kind: str) -> None:
    """A request for JSON must not get prose."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    formats = {"json_object": {}, "json_schema": {"json_schema": {"name": "x", "schema": schema}}}
    response = way.chat(messages=QUESTION, response_format={"type": kind, **formats[kind]}, max_tokens=40)
    assert response.text.startswith("{")
    if kind == "json_schema" or response.finish_reason == "stop":
        assert isinstance(json.loads(response.text), dict) and response.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["yaml", "xml"])
def test_breakage_response_format_that_is_unknown(way: Way, kind: str) -> None:
    """A format that the server does not know is refused; LangChain falls back when it reads these words."""
    with pytest.raises(openai.BadRequestError) as failure:
        way.chat(response_format={"type": kind})
    assert f"'response_format' of type '{kind}' is not supported with this model" in failure.value.message
    assert error_of(failure.value)["param"] == "response_format"


def test_breakage_tools_that_are_ignored(way: Way, server: Server) -> None:
    """A request with tools must not get a response that was made without them."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    prompt = server.http.post("/apply-template", json={"messages": QUESTION, "tools": tools}).json()["prompt"]
    assert '"look"' in prompt
    num_tokens = way.chat(messages=QUESTION, max_tokens=1).usage.prompt_tokens
    assert way.chat(messages=QUESTION, max_tokens=1, tools=tools).usage.prompt_tokens > num_tokens
    assert way.chat(max_tokens=1, tools=[], tool_choice="none").finish_reason == "length"


def test_breakage_bookkeeping_that_is_refused(way: Way) -> None:
    """Fields that do not change the response are no reason for an error."""
    response = way.chat(
        max_tokens=2,
        user="me",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        parallel_tool_calls=True,
        prompt_cache_key="x",
        safety_identifier="y",
        reasoning_effort="none",
        verbosity="medium",
        modalities=["text"],
    )
    assert response.finish_reason == "length"


def test_breakage_null_for_absent_fields(server: Server) -> None:
    """Clients in other languages write null for every field that is not set."""
    names = CompletionCreateParamsBase.__annotations__.keys() - {"model", "messages"}
    assert len(names) > 30
    body = {**dict.fromkeys(names), "stream": None, "model": MODEL, "messages": QUESTION}
    response = server.http.post(CHAT, json=body)
    assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers
    assert "8000" in response.json()["choices"][0]["message"]["content"]


def test_breakage_seed_that_is_ignored(way: Way) -> None:
    """A seed decides: different seeds give different responses, and the same seed gives the same response again."""
    fields = {"prompt": "A", "temperature": 2, "max_tokens": 3}
    found = [way.completion(seed=seed, **fields).text for seed in (1, 2, 3, 1, 2, 3)]
    assert found[:3] == found[3:] and len(set(found)) == 3


def test_breakage_stream_without_a_request_for_one(server: Server) -> None:
    """Without stream the response is one JSON object."""
    for fields in ({}, {"stream": False}, {"stream": None}):
        response = server.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 1, **fields})
        assert response.headers["content-type"] == "application/json"
        assert response.json()["object"] == "chat.completion"


def test_breakage_finish_reason_that_is_always_stop(way: Way) -> None:
    """Clients continue or warn when a response was cut off."""
    assert way.chat(messages=QUESTION, temperature=0, max_tokens=3).finish_reason == "length"
    assert way.chat(messages=QUESTION, temperature=0).finish_reason == "stop"


def test_breakage_choices_that_first_appear_out_of_order(caller: Caller) -> None:
    """The official client's accumulator expects the first chunks of choices in the order of their indices."""
    for seed in range(4):
        chunks = caller.chat_chunks(messages=[user("Repeat xqz")], n=4, seed=seed, temperature=2, max_tokens=3)
        assert list(dict.fromkeys(choice.index for chunk in chunks for choice in chunk.choices)) == [0, 1, 2, 3]
    chunks = caller.completion_chunks(prompt=["A", "B"], n=2, max_tokens=2)
    assert sorted({choice.index for chunk in chunks for choice in chunk.choices}) == [0, 1, 2, 3]


def test_breakage_retries_that_cannot_succeed(server: Server, new_caller: Callable[..., Caller]) -> None:
    """A client retries 5xx; x-should-retry: false keeps it from repeating a request that would fail again."""
    caller = new_caller(server.url, max_retries=2)
    before = server.metric("pagewick:requests_expired_total")
    with pytest.raises(openai.InternalServerError) as failure:
        caller.chat(messages=QUESTION, max_tokens=1500, extra_body={"ignore_eos": True, "timeout": 0.05})
    assert (failure.value.status_code, error_of(failure.value)["code"]) == (504, "deadline_exceeded")
    assert failure.value.response.headers["x-should-retry"] == "false"
    until(lambda: server.metric("pagewick:requests_expired_total") > before)
    assert server.metric("pagewick:requests_expired_total") == before + 1


def test_breakage_one_user_who_fills_the_cache(guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """Prompt and response must fit into the context together; otherwise the request is refused before any work."""
    caller = new_caller(guarded.url, key=KEY)
    with pytest.raises(openai.BadRequestError) as failure:
        caller.chat(max_tokens=2048)
    assert error_of(failure.value)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/responses/x/cancel", "/v1/audio/speech"])
def test_breakage_routes_that_are_not_there(server: Server, path: str) -> None:
    """A route that does not exist gives an error object like every other error."""
    response = server.http.post(path, json={"model": MODEL, "input": "x"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "not_found"
