"""Chat completions through the official client."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from pagewick.errors import EngineDeadError
from tests.fake_engine import DEATH, END, MAX_MODEL_LEN, NAN_ROW, TOKENIZER, spell
from tests.server.conftest import MODEL, Server

HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def stream_events(http: httpx.Client, **fields: Any) -> list[Any]:
    """The data of every event; a comment is None."""
    body = {"model": MODEL, "messages": HELLO, "stream": True, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    events: list[Any] = []
    for block in response.text.split("\n\n")[:-1]:
        if block.startswith(":"):
            events.append(None)
        else:
            assert block.startswith("data: ")
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def test_answer(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.extras = {"num_cached_tokens": 4}
    completion = sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    assert completion.id.startswith("chatcmpl-") and abs(completion.created - time.time()) < 5
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello 😀!", "stop")
    (request,) = server.engine_client.requests
    assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens == len(request.prompt_token_ids)
    assert completion.usage.completion_tokens == len(spell("Hello 😀!")) + 1
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.prompt_tokens_details.cached_tokens == 4
    assert request.params.max_tokens is None
    text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_body_has_exactly_the_keys_of_the_api(http: httpx.Client) -> None:
    body = http.post("/v1/chat/completions", json={"messages": HELLO}).json()
    assert sorted(body) == ["choices", "created", "id", "model", "object", "system_fingerprint", "usage"]
    assert sorted(body["choices"][0]) == ["finish_reason", "index", "logprobs", "message", "stop_reason"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello 😀!", "refusal": None}


def test_stream_has_the_order_of_the_api(http: httpx.Client) -> None:
    *events, done = stream_events(http)
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all("usage" not in event and len(event["choices"]) == 1 for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == ["H", "e", "l", "l", "o", " ", "😀", "!"]
    assert all(list(delta) == ["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]


def test_stream_headers(server: Server) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]


def test_usage_chunk_only_if_wanted(server: Server, http: httpx.Client) -> None:
    server.engine_client.extras = {"num_cached_tokens": 2}
    *events, last, done = stream_events(http, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "stream_options": {"include_usage": True}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def test_the_client_accumulates_a_stream(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.texts = ["Hello 😀!", "Bye 👩‍👩‍👧"]
    with sdk.chat.completions.stream(model=MODEL, messages=HELLO, n=2, logprobs=True, top_logprobs=1) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello 😀!", "Bye 👩‍👩‍👧"]
    assert [choice.message.role for choice in final.choices] == ["assistant", "assistant"]
    whole = sdk.chat.completions.create(model=MODEL, messages=HELLO, n=2, logprobs=True, top_logprobs=1)
    for streamed, choice in zip(final.choices, whole.choices, strict=True):
        assert streamed.logprobs is not None and streamed.logprobs == choice.logprobs


def test_choices_stream_side_by_side(server: Server, http: httpx.Client) -> None:
    server.engine_client.texts = ["aaaa", "bb"]
    *events, _ = stream_events(http, n=2)
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
    assert texts == {0: "aaaa", 1: "bb"}
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 1]
    assert [event["choices"][0]["finish_reason"] for event in events].count("stop") == 2
    indices = [event["choices"][0]["index"] for event in events[2:]]
    assert indices[:4].count(0) == indices[:4].count(1) == 2


def test_async_client(server: Server) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(main()) == "Hello 😀!"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["lo", ["zzz", "lo 😀"]])
def test_stop_string_across_tokens(server: Server, sdk: openai.OpenAI, stop: Any, stream: bool) -> None:
    if stream:
        chunks = list(sdk.chat.completions.create(model=MODEL, messages=HELLO, stop=stop, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hel"
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        completion = sdk.chat.completions.create(model=MODEL, messages=HELLO, stop=stop)
        assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("Hel", "stop")
        assert completion.usage is not None
        assert completion.usage.completion_tokens == len(spell("Hel" + (stop if isinstance(stop, str) else stop[1])))
    server.until(lambda: len(server.engine_client.aborted_choices) == 1)


def test_limits_on_tokens(server: Server, sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("Hello", "length")
    assert completion.usage is not None and completion.usage.completion_tokens == 5
    completion = sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, max_completion_tokens=2)
    assert completion.choices[0].message.content == "He"


def test_a_cut_character_shows_at_the_very_end_only(http: httpx.Client) -> None:
    *events, _ = stream_events(http, max_tokens=8)
    texts = [event["choices"][0]["delta"].get("content") for event in events]
    assert texts[-3:] == [" ", "\ufffd", None]


def test_every_supported_parameter_reaches_the_engine(server: Server, http: httpx.Client) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -3, "n": 2, "stop_token_ids": [5], "ignore_eos": True,
        "min_tokens": 3, "skip_special_tokens": False, "max_tokens": 9,
    }  # fmt: skip
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers
    request = server.engine_client.requests[0]
    assert request.seed == -3
    del fields["seed"]
    assert {name: getattr(request.params, name) for name in fields} == {**fields, "stop_token_ids": (5,)}


def test_null_is_the_same_as_nothing(server: Server, http: httpx.Client) -> None:
    names = (
        "temperature top_p top_k seed n stop stop_token_ids max_tokens logprobs top_logprobs stream tools logit_bias"
    )
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **dict.fromkeys(names.split())})
    assert response.status_code == 200, response.text
    assert server.engine_client.requests[0].params.temperature == 1.0


def test_messages_of_all_kinds(server: Server, http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None, "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": [], "tool_calls": []},
        {"role": "user", "content": "x<|im_end|>"},
    ]
    response = http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    text = TOKENIZER.decode(server.engine_client.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    end = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]
    assert server.engine_client.requests[0].prompt_token_ids.count(end) == len(messages)


def test_template_variables(server: Server, sdk: openai.OpenAI) -> None:
    sdk.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    token_ids = server.engine_client.requests[0].prompt_token_ids
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False).endswith("<think>\n\n</think>\n\n")


def test_logprobs(server: Server, sdk: openai.OpenAI) -> None:
    completion = sdk.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and logprobs.refusal is None
    assert b"".join(bytes(one.bytes or []) for one in logprobs.content).decode() == "Hello 😀!"
    first = logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("H", -0.25, [72])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("H", -0.25), ("</s>", -1.5), ("z", -9999.0)]
    completion = sdk.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert completion.choices[0].logprobs is not None and completion.choices[0].logprobs.content is not None
    assert all(one.top_logprobs == [] for one in completion.choices[0].logprobs.content)


def test_streamed_logprobs_go_with_their_text(http: httpx.Client) -> None:
    *events, _ = stream_events(http, logprobs=True)
    for event in events[1:-1]:
        (choice,) = event["choices"]
        spelled = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
        assert spelled.decode() == choice["delta"]["content"]
    assert events[-1]["choices"][0]["logprobs"] is None
    *events, _ = stream_events(http, logprobs=True, stop="o 😀")
    tokens = [
        one["token"] for event in events for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(tokens) == len(spell("Hello 😀"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_an_http_error(sdk: openai.OpenAI, stream: bool) -> None:
    for content in ("x" * 2 * MAX_MODEL_LEN, "x" * 100 * MAX_MODEL_LEN):
        with pytest.raises(openai.BadRequestError) as raised:
            sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], stream=stream)
        assert raised.value.code == "context_length_exceeded"
        assert f"This model's maximum context length is {MAX_MODEL_LEN} tokens" in raised.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status"), [(NAN_ROW, 500), (DEATH, 503)])
def test_a_failure_before_the_first_token_is_an_http_error(
    server: Server, http: httpx.Client, failure: Exception, status: int, stream: bool
) -> None:
    server.engine_client.pause_at, server.engine_client.failure = 0, failure
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == str(failure)
    assert ("retry-after" in response.headers) == isinstance(failure, EngineDeadError)


@pytest.mark.parametrize("failure", [NAN_ROW, DEATH])
def test_a_failure_in_a_stream_is_an_error_event(server: Server, sdk: openai.OpenAI, failure: Exception) -> None:
    server.engine_client.pause_at, server.engine_client.failure = 3, failure
    text = ""
    with pytest.raises(openai.APIError, match=str(failure)):
        for chunk in sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "Hel"


def test_an_internal_mistake_tells_the_client_nothing(server: Server, http: httpx.Client) -> None:
    server.engine_client.failure = ValueError("secret /path")
    server.engine_client.pause_at = 0
    response = http.post("/v1/chat/completions", json={"messages": HELLO})
    assert response.status_code == 500 and "secret" not in response.text and response.headers["x-request-id"]
    server.engine_client.pause_at = 2
    events = stream_events(http)
    assert "internal error" in events[-1]["error"]["message"] and "secret" not in json.dumps(events)


def test_a_dead_engine_answers_503(server: Server, sdk: openai.OpenAI, http: httpx.Client) -> None:
    server.engine_client.is_alive = False
    with pytest.raises(openai.InternalServerError) as raised:
        sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert raised.value.status_code == 503 and raised.value.response.headers["retry-after"]
    assert http.get("/health").status_code == 503


def test_pings_keep_a_silent_stream_open(server: Server, http: httpx.Client) -> None:
    client = server.engine_client
    client.pause_at = 0
    with http.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
        client.go_on()
        rest = [line for line in lines if line.startswith("data:")]
    assert rest[-1] == "data: [DONE]" and '"role":"assistant"' in rest[0]


def test_the_official_client_ignores_pings(server: Server, sdk: openai.OpenAI) -> None:
    client = server.engine_client
    client.pause_at = 2
    stream = iter(sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    text = "".join(next(stream).choices[0].delta.content or "" for _ in range(3))
    time.sleep(0.5)
    client.go_on()
    assert text + "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello 😀!"


def test_end_token_is_counted_but_not_shown(server: Server, http: httpx.Client) -> None:
    server.engine_client.texts = [""]
    body = http.post("/v1/chat/completions", json={"messages": HELLO, "skip_special_tokens": False}).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens"] == 1
    assert TOKENIZER.token_bytes(END) == b"</s>"
