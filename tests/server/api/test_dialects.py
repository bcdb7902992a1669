"""Requests of other servers' clients: llama.cpp's names, those of the Rust servers, and fields without effect."""

from __future__ import annotations

import asyncio
import difflib
import json
from dataclasses import replace
from typing import Any

import pytest

import tests.server.api_routes
from pagewick.async_llm import AsyncEngine
from pagewick.engine.messages import EngineRequest, PrefixMiss
from pagewick.sampling_params import SamplingParams
from pagewick.server.api.decoding import decode_request
from pagewick.server.api.known_fields import HARMLESS, UNSUPPORTED
from pagewick.server.api.protocol import ChatCompletionRequest, CompletionRequest
from tests.fake_engine import TOKENIZER, FakeClient, fake_engine, spell
from tests.server.api_routes import CHAT, HELLO, Api, error_of

COMPLETIONS = "/v1/completions"
ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def sent(path: str, **fields: Any) -> Any:
    """Return the engine's request for these fields."""
    api = Api()
    response = ask(api, path, **fields)
    assert response.status_code == 200, response.text
    assert "x-pagewick-ignored" not in response.headers
    return api.client.requests[0]


def ask(api: Api, path: str, **fields: Any) -> Any:
    return api.post(path, **{**({"messages": HELLO} if path == CHAT else {"prompt": "hi"}), **fields})


@ROUTES
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ({"Single": "a"}, ("a",)),
        ({"Multiple": ["a", "b"]}, ("a", "b")),
        ([*"abcdefghijklmnop"], tuple("abcdefghijklmnop")),
    ],
)
def test_stop_in_all_forms(path: str, stop: Any, expected: tuple[str, ...]) -> None:
    api = Api()
    assert ask(api, path, stop=stop).status_code == 200
    # The engine is not told of strings; what they do is tested where text is made.
    api.client.texts = [f"xy{expected[-1]}z"]
    body = ask(api, path, stop=stop).json()["choices"][0]
    text = body["message"]["content"] if path == CHAT else body["text"]
    assert (text, body["finish_reason"], body["stop_reason"]) == ("xy", "stop", expected[-1])


@ROUTES
@pytest.mark.parametrize(
    "stop",
    [
        {"Single": ["a"]}, {"Multiple": "a"}, {"Several": ["a"]}, {}, {"Single": "a", "Multiple": ["b"]},
        [*map(str, range(17))], {"Multiple": [*map(str, range(17))]}, {"Single": ""}, {"Single": "x" * 1025},
    ],
)  # fmt: skip
def test_stop_in_no_form(path: str, stop: Any) -> None:
    assert error_of(ask(Api(), path, stop=stop))["param"] == "stop"


@ROUTES
def test_a_stop_string_may_stay(path: str) -> None:
    body = ask(Api(), path, stop="llo", include_stop_str_in_output=True).json()["choices"][0]
    assert (body["message"]["content"] if path == CHAT else body["text"]) == "Hello"


@ROUTES
@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"5": 1.5}, {5: 1.5}),
        ([[5, 1.5]], {5: 1.5}),
        ([[5, False]], {5: -100.0}),
        ([["é", -2]], dict.fromkeys(spell("é"), -2.0)),
        ([["aa", 1], [spell("a")[0], 2.5]], {spell("a")[0]: 4.5}),
        ([[7, False], [7, 50]], {7: -100.0}),
        ([], {}),
        ({}, {}),
    ],
)
def test_logit_bias_in_all_forms(path: str, bias: Any, expected: dict[int, float]) -> None:
    assert len(TOKENIZER.encode("aa", add_special_tokens=False)) == 2
    assert (sent(path, logit_bias=bias).params.logit_bias or {}) == expected


@ROUTES
@pytest.mark.parametrize(
    "bias",
    [
        [[5, True]],
        [[5, 101]],
        [[5, 60], [5, 60]],
        [[-1, 1]],
        [[10**6, 1]],
        {"1000000": 1},
        {"a": 1},
        [["a", None]],
        [["a", 0]] * 1025,
        [[5]],
    ],
)
def test_logit_bias_that_cannot_be(path: str, bias: Any) -> None:
    assert error_of(ask(Api(), path, logit_bias=bias))["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"n_predict": 7}, 7),
        (CHAT, {"n_predict": -1}, None),
        (CHAT, {"n_predict": 7, "max_completion_tokens": 3}, 3),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 3}, 3),
        (COMPLETIONS, {"n_predict": 7}, 7),
        (COMPLETIONS, {"n_predict": -1}, None),
        (COMPLETIONS, {"max_tokens": 7, "max_completion_tokens": 3}, 3),
        (COMPLETIONS, {}, 16),
    ],
)
def test_how_many_tokens(path: str, fields: dict[str, Any], expected: int | None) -> None:
    assert sent(path, **fields).params.max_tokens == expected


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"n_probs": 3}, 3),
        (CHAT, {"n_probs": 0}, None),
        (CHAT, {"logprobs": True, "top_logprobs": 0}, 0),
        (COMPLETIONS, {"n_probs": 3}, 3),
        (COMPLETIONS, {"n_probs": 0}, None),
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
    ],
)
def test_how_many_logprobs(path: str, fields: dict[str, Any], expected: int | None) -> None:
    assert sent(path, **fields).params.logprobs == expected


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_tokens": 1, "n_predict": 1}, "n_predict"),
        (CHAT, {"n_predict": -2}, "n_predict"),
        (CHAT, {"n_probs": 3, "logprobs": True}, "n_probs"),
        (CHAT, {"n_probs": 3, "top_logprobs": 3}, "n_probs"),
        (CHAT, {"n_probs": 21}, "n_probs"),
        (COMPLETIONS, {"n_probs": 3, "logprobs": 3}, "n_probs"),
        (COMPLETIONS, {"max_tokens": 1, "n_predict": 2}, "n_predict"),
    ],
)
def test_names_that_contradict(path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(ask(Api(), path, **fields))["param"] == param


@ROUTES
def test_a_prompt_that_is_not_to_be_cached_has_a_salt_of_its_own(path: str) -> None:
    salts = [sent(path, cache_prompt=False).options.cache_salt for _ in range(2)]
    assert None not in salts and salts[0] != salts[1]
    assert sent(path, cache_prompt=False, cache_salt="mine").options.cache_salt not in (None, "mine")
    assert sent(path, cache_prompt=True).options.cache_salt is None


@ROUTES
def test_keys_share_no_prefixes_if_the_server_says_so(path: str) -> None:
    def options_of(scope: str, key: str, **fields: Any) -> Any:
        api = Api(prefix_cache_scope=scope)
        body = {**({"messages": HELLO} if path == CHAT else {"prompt": "hi"}), **fields}
        response = api.run(lambda http: http.post(path, json=body, headers={"x-test-key": key}))
        assert response.status_code == 200, response.text
        return api.client.requests[0].options

    salt = "x" * 256
    by_key = [options_of("key", key, **fields).cache_salt for key in "ab" for fields in ({}, {"cache_salt": salt})]
    assert len(set(by_key)) == 4 and None not in by_key and salt not in by_key
    assert options_of("key", "a").cache_salt == by_key[0]
    # Nobody is told from others: there are no keys.
    assert options_of("key", "").cache_salt is None
    for key in ("a", "b"):
        assert options_of("global", key).cache_salt is None
        assert options_of("global", key, cache_salt=salt).cache_salt == salt
        assert options_of("global", key).fairness_key == key
    sessions = {options_of("global", key, session_id=salt).session_id for key in ("a", "b", "")}
    assert len(sessions) == 3 and salt in sessions
    # A key's own salt is not one that its client brought, which alone is told where the cache ended.
    api = Api(prefix_cache_scope="key")
    api.client.extras = {"prefix_miss": PrefixMiss(1, 17, 99)}
    body = api.run(lambda http: http.post(CHAT, json={"messages": HELLO}, headers={"x-test-key": "a"})).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_timings_are_told_to_those_who_ask() -> None:
    api = Api()
    api.client.extras = {"num_cached_tokens": 2, "prefill_s": 0.5}
    for path in (CHAT, COMPLETIONS):
        timings = ask(api, path, timings_per_token=True).json()["timings"]
        num_prompt_tokens = len(api.client.requests[-1].prompt_token_ids)
        assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (2, num_prompt_tokens - 2, 500)
        assert timings["prompt_per_second"] == (num_prompt_tokens - 2) / 0.5
        assert timings["predicted_n"] == 12
        assert (timings["predicted_ms"], timings["predicted_per_second"]) == (pytest.approx(110), pytest.approx(100))
        assert "timings" not in ask(api, path).json()
    events = api.chat_events(timings_per_token=True)
    counts = [event["timings"]["predicted_n"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12
    assert all("timings" not in event for event in api.chat_events())


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = Api().chat_events(stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 12
    assert all("usage" not in event for event in Api().chat_events(stream_options={"continuous_usage_stats": True}))


@ROUTES
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_every_unsupported_field_is_refused_unless_it_asks_for_nothing(path: str, name: str) -> None:
    kind = ChatCompletionRequest if path == CHAT else CompletionRequest
    if name in kind.__struct_fields__:
        return
    error = error_of(ask(Api(), path, **{name: {"some": "thing"}}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter") and name in error["message"]
    for value in (None, *UNSUPPORTED[name]):
        assert sent(path, **{name: value})


@ROUTES
def test_harmless_fields(path: str) -> None:
    assert sent(path, **dict.fromkeys(sorted(HARMLESS), "x"))


def test_an_unknown_response_format_is_refused_in_words_that_clients_know() -> None:
    message = error_of(Api().chat(response_format={"type": "yaml"}))["message"]
    assert "'response_format' of type 'yaml' is not supported with this model" in message


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("modalities", ["audio"], "a model that speaks or draws; this one writes text"),
        ("best_of", 2, "not a field of this route"),
    ],
)
def test_refusals_name_the_missing_feature(name: str, value: Any, reason: str) -> None:
    message = error_of(Api().chat(**{name: value}))["message"]
    assert name in message and reason in message and "leave it out" in message


@pytest.mark.parametrize(
    ("path", "name", "advice"),
    [
        (COMPLETIONS, "messages", ": send it to /v1/chat/completions"),
        (COMPLETIONS, "reasoning_effort", "; leave it out"),
        (COMPLETIONS, "parallel_tool_calls", "; leave it out"),
        (CHAT, "prompt", ": send it to /v1/completions"),
        (CHAT, "input", ": send it to /v1/embeddings or /v1/responses"),
    ],
)
def test_fields_of_another_route_are_refused(path: str, name: str, advice: str) -> None:
    message = error_of(ask(Api(), path, **{name: "x"}))["message"]
    assert message == f"{name} is not a field of this route{advice}"


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
def test_the_prompt_of_a_chat_is_made_from_its_own_body(path: str) -> None:
    fields = {"max_completion_tokens": 3, "parallel_tool_calls": False, "thinking_budget": 5, "top_logprobs": 2}
    response = Api().post(path, messages=HELLO, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-pagewick-ignored"].split(", ") == list(fields)


def test_a_refusal_that_names_another_way_gives_no_other_advice() -> None:
    message = error_of(Api().chat(lora=[{"id": 0}]))["message"]
    assert message.endswith("GET /v1/models lists them")


@ROUTES
def test_a_strict_server_takes_no_unknown_fields(path: str) -> None:
    strict = Api(strict=True)
    error = error_of(ask(strict, path, temprature=1, zzz=2))
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    assert "temprature (did you mean temperature?), zzz" in error["message"]
    fields = {"user": "me", "seed": 1, "grammar": None}
    assert ask(strict, path, **fields).status_code == 200
    assert ask(Api(), path, temprature=1).headers["x-pagewick-ignored"] == "temprature"


def test_a_strict_server_compares_no_more_of_an_unknown_name_than_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def get_close_matches(word: str, *_: object, **options: object) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", get_close_matches)
    name = "x" * 100_000
    assert error_of(Api(strict=True).chat(**{name: 1}))["param"] == name[:64]
    assert compared == [name[:64]]


def test_unknown_fields_of_messages_are_named_too() -> None:
    messages = [{"role": "user", "content": "hi", "prefix": True, "audio": None, "annotations": [], "x y": 1}]
    response = Api().chat(messages=messages)
    assert response.headers["x-pagewick-ignored"] == "messages[].prefix, messages[].x?y"
    assert error_of(Api(strict=True).chat(messages=messages))["param"] == "messages[].prefix"


def test_unknown_fields_of_a_messages_parts_are_named_too() -> None:
    text = {"type": "text", "text": "hi", "annotations": [], "cache_control": {"type": "ephemeral"}, "citations": None}
    for part in (text, {"type": "refusal", "refusal": "no"}):
        assert "x-pagewick-ignored" not in Api().chat(messages=[{"role": "user", "content": [part]}]).headers
    messages = [{"role": "user", "content": [text, {**text, "lang": "de", "x y": 1}]}]
    response = Api().chat(messages=messages)
    assert response.status_code == 200
    assert response.headers["x-pagewick-ignored"] == "messages[].content[].lang, messages[].content[].x?y"
    assert error_of(Api(strict=True).chat(messages=messages))["param"] == "messages[].content[].lang"
    image = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    assert "image_url" in error_of(Api(strict=True).chat(messages=[{"role": "user", "content": [image]}]))["message"]


def test_an_unknown_field_of_a_structural_tag_is_refused() -> None:
    """Unlike others, by every server: it could say what the response must not be."""
    form = {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}],
    }
    asked = {"type": "structural_tag", "format": form, "name": "x", "description": None}
    assert "x-pagewick-ignored" not in Api().chat(response_format=asked).headers
    error = error_of(Api().chat(response_format={**asked, "format": {**form, "excludes": ["x"]}}))
    assert error["param"] == "response_format" and "'excludes' in a format of type triggered_tags" in error["message"]


FUNCTION = {"name": "f", "description": "x", "parameters": {"type": "object", "anything": 1}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (
            {"stream": True, "stream_options": {"include_usage": True, "chunk_size": 3, "none": None}},
            "stream_options.chunk_size",
        ),
        ({"thinking": {"type": "disabled", "budget": 3}}, "thinking.budget"),
        ({"response_format": {"type": "text", "schma": {"a": 1}}}, "response_format.schma"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-y": 1}, "name": "a", "nme": 1}}},
            "response_format.json_schema.nme",
        ),
        (
            {"tools": [{"type": "function", "function": FUNCTION, "x": 1}, {"function": {"name": "g"}, "x": 1}]},
            "tools[].x",
        ),
        ({"tools": [{"function": {**FUNCTION, "return": {"type": "string"}}}]}, "tools[].function.return"),
        ({"functions": [{**FUNCTION, "x": 1}], "function_call": "none"}, "functions[].x"),
        (
            {"tools": [{"function": FUNCTION}], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}},
            "tool_choice.function.x",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unknown_fields_of_objects_are_named_too(fields: dict[str, Any], ignored: str) -> None:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    assert decode_request(body, ChatCompletionRequest)[1] == [ignored]
    error = error_of(Api(strict=True).chat(**fields))
    assert (error["param"], error["code"]) == (ignored, "unknown_parameter")


def test_a_response_names_the_unknown_fields_of_objects() -> None:
    response = Api().chat(stream=True, x=1, stream_options={"include_usage": True, "x y": 1})
    assert response.status_code == 200 and response.headers["x-pagewick-ignored"] == "x, stream_options.x?y"
    assert '"usage":{' in response.text


def test_an_unknown_field_of_an_object_is_compared_with_those_of_the_object() -> None:
    error = error_of(Api(strict=True).chat(stream=True, stream_options={"include_usge": True}))
    assert "stream_options.include_usge (did you mean stream_options.include_usage?)" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "description": "b", "strict": True,
                                                                    "schema": {"type": "integer", "title": "x"}}}},
        {"response_format": {"type": "json_object", "schema": {"type": "object", "x": 1}}},
        {"metadata": {"anything": 1}, "logit_bias": {"5": 1}},
        {"thinking": {"type": "disabled", "budget_tokens": None, "display": None}},
        {"messages": [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}]},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_clients_are_known_to_send_in_objects_is_accepted(fields: dict[str, Any]) -> None:
    """A strict server takes it, too."""
    for api in (Api(), Api(strict=True)):
        response = api.chat(**fields)
        assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers, response.text


def test_the_response_has_the_id_that_the_client_wants() -> None:
    assert Api().chat(request_id="my.id:1").json()["id"] == "chatcmpl-my.id:1"
    assert {event["id"] for event in Api().chat_events(request_id="x")} == {"chatcmpl-x"}
    for bad in ("", "a b", "x" * 129):
        assert error_of(Api().chat(request_id=bad))["param"] == "request_id"


def test_the_same_request_id_may_be_in_use_twice() -> None:
    api = Api()
    api.client.pause_at = 1

    async def both(http: Any) -> list[int]:
        body = {"messages": HELLO, "request_id": "same"}
        tasks = [asyncio.create_task(http.post(CHAT, json=body, headers={"x-request-id": "same"})) for _ in range(2)]
        while api.client.num_paused < 2:
            await asyncio.sleep(0)
        api.client.go_on()
        return [(await task).status_code for task in tasks]

    assert api.run(both) == [200, 200]


@ROUTES
def test_defaults_of_the_server_are_for_requests_that_do_not_say(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is lowered to the room that a prompt leaves; a limit of the client's that does not fit is refused."""
    api = Api()
    defaults = SamplingParams(temperature=0.5, top_k=7, max_tokens=400)

    def engine_with_defaults(client: FakeClient) -> AsyncEngine:
        engine = fake_engine(client)
        engine.default_params = defaults
        return engine

    monkeypatch.setattr(tests.server.api_routes, "fake_engine", engine_with_defaults)

    def request(**fields: Any) -> EngineRequest:
        assert ask(api, path, **fields).status_code == 200
        return api.client.requests[-1]

    assert (request().params, request().options.lowers_max_tokens) == (defaults, True)
    own = request(temperature=1.5, max_tokens=3)
    assert (own.params, own.options.lowers_max_tokens) == (replace(defaults, temperature=1.5, max_tokens=3), False)
    assert request(n_predict=-1).params.max_tokens is None
    assert request(truncate_prompt_tokens=-1).prompt_token_ids == request().prompt_token_ids


@ROUTES
@pytest.mark.parametrize(
    ("chosen", "expected"), [((), 1), (("temperature",), 0)], ids=["the model's", "the operator's"]
)
def test_a_request_for_a_way_of_sampling_is_no_greedy_one(
    path: str, chosen: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the operator chose a temperature of 0."""
    api = Api()

    def greedy_engine(client: FakeClient) -> AsyncEngine:
        engine = fake_engine(client)
        engine.default_params, engine.chosen_defaults = SamplingParams(temperature=0), chosen
        return engine

    monkeypatch.setattr(tests.server.api_routes, "fake_engine", greedy_engine)
    for fields, temperature in (
        ({"top_p": 0.9}, expected),
        ({"mirostat": 2}, expected),
        ({"top_p": 1}, 0),
        ({"top_p": 0.9, "temperature": 0}, 0),
        ({}, 0),
    ):
        assert ask(api, path, **fields).status_code == 200
        assert api.client.requests[-1].params.temperature == temperature
