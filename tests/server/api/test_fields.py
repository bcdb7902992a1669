"""Every field of sampling and serving reaches the engine from both routes, and its results reach the client."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage

from pagewick.engine.messages import PrefixMiss, RequestOptions
from pagewick.sampling_params import SamplingParams
from pagewick.server.api.protocol import ChatCompletionRequest, CompletionRequest
from pagewick.server.api.request_fields import ChoiceFields, SamplingFields, ServingFields
from pagewick.server.api.structured_fields import StructuredFields
from tests.fake_engine import spell
from tests.server.conftest import MODEL, Server

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
ROUTES = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])

# Sent together; each value differs from the default.
GROUPS: list[dict[str, Any]] = [
    {
        "n": 2, "max_tokens": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "typical_p": 0.75,
        "top_n_sigma": 1.5, "seed": -3, "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 3,
        "skip_special_tokens": False, "repetition_penalty": 1.25, "repeat_last_n": 64, "presence_penalty": -1.5,
        "frequency_penalty": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.25, "bad_words": ["a", "b c"],
        "allowed_token_ids": [3, 4], "prompt_logprobs": 2, "include_stop_str_in_output": True,
    },
    {
        "dry_multiplier": 0.75, "dry_base": 2.5, "dry_allowed_length": 3, "dry_penalty_last_n": 100,
        "dry_sequence_breakers": ["x", "\n"],
    },
    {"mirostat": 2, "mirostat_tau": 4.5, "mirostat_eta": 0.5},
    {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": True},
]  # fmt: skip


REGEX = "[ab]{2}"
SCHEMA = {"type": "integer"}
# Each way to give the response a form.
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": REGEX}}, {"guided_regex": REGEX},
    {"constraint": REGEX, "constraint_type": "regex"}, {"guided_choice": ["a", "b"]},
    {"grammar": "root ::= [0-9]+"}, {"guided_grammar": "start: /[0-9]+/"}, {"json_schema": SCHEMA},
    {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, {"guided_json_object": True},
    {"response_format": {"type": "json_object"}},
]  # fmt: skip


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    return http.post(path, json={**body, **fields})


@ROUTES
@pytest.mark.parametrize("fields", GROUPS, ids=lambda fields: next(iter(fields)))
def test_sampling_fields(server: Server, http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    response = post(http, path, **fields)
    assert response.status_code == 200, response.text
    assert "x-pagewick-ignored" not in response.headers
    (request,) = server.engine_client.requests
    sent = {**dataclasses.asdict(request.params), "seed": request.seed}
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    assert {name: sent[name] for name in fields} == expected
    assert all(getattr(SamplingParams(), name) != value for name, value in expected.items())


def test_every_sampling_field_was_tried() -> None:
    tried = {name for group in GROUPS for name in group} | {"stop", "repeat_penalty", "logit_bias"}
    own = {*ChoiceFields.__struct_fields__} - {*ServingFields.__struct_fields__}
    assert {*SamplingFields.__struct_fields__} | own == tried
    # The others have their own meaning in each route.
    others = {"logprobs", "best_of", "structured_outputs"}  # The last has several names: see FORMS.
    assert {field.name for field in dataclasses.fields(SamplingParams)} - tried == others
    tried_forms = {name for form in FORMS for name in form}
    assert tried_forms == {*StructuredFields.__struct_fields__} - {*ChoiceFields.__struct_fields__}
    for kind in (ChatCompletionRequest, CompletionRequest):
        assert set(kind.__struct_fields__) >= {*ChoiceFields.__struct_fields__}


@ROUTES
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_form_reaches_the_engine_as_a_grammar(
    server: Server, http: httpx.Client, path: str, form: dict[str, Any]
) -> None:
    response = post(http, path, **form)
    assert response.status_code == 200, response.text
    assert "x-pagewick-ignored" not in response.headers
    (request,) = server.engine_client.requests
    constraint = request.constraint
    assert isinstance(constraint, dict) and constraint["type"] == "grammar", constraint


@ROUTES
def test_fields_that_change_their_form(server: Server, http: httpx.Client, path: str) -> None:
    response = post(http, path, repeat_penalty=1.5, logit_bias={"5": -100, "007": 0.5}, bad_words=["x"])
    assert response.status_code == 200, response.text
    (request,) = server.engine_client.requests
    assert request.params.repetition_penalty == 1.5
    assert request.params.logit_bias == {5: -100, 7: 0.5}
    assert request.bad_word_ids == [spell("x"), spell(" x")]


@ROUTES
def test_dry_breakers_go_as_tokens(server: Server, http: httpx.Client, path: str) -> None:
    assert post(http, path, dry_multiplier=1, dry_sequence_breakers=["\n"]).status_code == 200
    assert post(http, path, dry_sequence_breakers=["\n"]).status_code == 200
    assert [one.dry_breaker_ids for one in server.engine_client.requests] == [[], []]
    newline = spell("\n")[0]
    masks = [int.from_bytes(one.dry_breaker_mask, "little") for one in server.engine_client.requests]
    assert masks == [1 << newline, 0]


@ROUTES
def test_serving_fields(server: Server, http: httpx.Client, path: str) -> None:
    response = post(http, path, priority=3, cache_salt="salt", session_id="me", timeout=2.5)
    assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers
    post(http, path, user="somebody", priority=None, timeout=None)
    assert [request.options for request in server.engine_client.requests] == [
        RequestOptions(priority=3, cache_salt="salt", session_id="me", timeout_s=2.5),
        RequestOptions(),
    ]


@ROUTES
def test_a_number_as_session_id_counts_as_its_digits(server: Server, http: httpx.Client, path: str) -> None:
    for session_id in (17, "17", 2**64, -1):
        assert post(http, path, session_id=session_id).status_code == 200
    session_ids = [request.options.session_id for request in server.engine_client.requests]
    assert session_ids == ["17", "17", str(2**64), "-1"]


@ROUTES
def test_no_client_is_more_urgent_than_others(server: Server, http: httpx.Client, path: str) -> None:
    for priority in (-1, -(2**31)):
        response = post(http, path, priority=priority)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "priority")
        assert "0 or more over HTTP" in error["message"] and str(priority) in error["message"]
    assert not server.engine_client.requests
    assert post(http, path, priority=0).status_code == 200


@ROUTES
def test_beams_stream_whole(server: Server, http: httpx.Client, path: str) -> None:
    server.engine_client.texts = ["first 😀", "second"]
    response = post(http, path, use_beam_search=True, n=2, stream=True)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    texts = [(one["index"], one.get("text") or one.get("delta", {}).get("content")) for one in choices]
    assert [one for one in texts if one[1]] == [(0, "first 😀"), (1, "second")]
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["stop", "stop"]


def test_prompt_logprobs_of_a_chat(server: Server, http: httpx.Client) -> None:
    body = post(http, "/v1/chat/completions", prompt_logprobs=1, n=2).json()
    prompt = server.engine_client.requests[0].prompt_token_ids
    first, *others = body["prompt_logprobs"]
    assert first is None and [list(one) for one in others] == [[str(token_id)] for token_id in prompt[1:]]
    assert others[0][str(prompt[1])] == {"logprob": -2.0, "rank": 3, "decoded_token": "user"}
    assert "prompt_logprobs" not in post(http, "/v1/chat/completions").json()


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_of_cache_and_speculation(server: Server, sdk: openai.OpenAI, stream: bool) -> None:
    server.engine_client.extras = {
        "num_cached_tokens": 4, "prefix_miss": PrefixMiss(4, 17, 99), "num_draft_tokens": 9, "num_accepted_tokens": 5,
    }  # fmt: skip
    usage: CompletionUsage | None
    if stream:
        *_, last = sdk.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        usage = last.usage
    else:
        usage = sdk.chat.completions.create(model=MODEL, messages=HELLO).usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert usage.completion_tokens_details.rejected_prediction_tokens == 4
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.to_dict() == {"cached_tokens": 4}


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_only_who_has_a_salt_is_told_where_the_cache_ended(
    server: Server, http: httpx.Client, path: str, stream: bool
) -> None:
    def details(**fields: Any) -> Any:
        if not stream:
            return post(http, path, **fields).json()["usage"]["prompt_tokens_details"]
        text = post(http, path, stream=True, stream_options={"include_usage": True}, **fields).text
        *_, last = [line for line in text.splitlines() if line.startswith("data: {")]
        return json.loads(last[6:])["usage"]["prompt_tokens_details"]

    server.engine_client.extras = {"num_cached_tokens": 1, "prefix_miss": PrefixMiss(1, 17, 99)}
    assert details() == details(cache_salt=None) == details(session_id="mine") == {"cached_tokens": 1}
    assert details(cache_salt="mine") == {"cached_tokens": 1, "prefix_miss_position": 1}
    server.engine_client.extras = {"num_cached_tokens": 1}
    assert details(cache_salt="mine") == {"cached_tokens": 1}


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code", "headers"),
    [
        ({"error_kind": "QueueFullError", "retry_after_s": 7}, 429, "queue_full", {"retry-after": "7"}),
        ({"error_kind": "QueueFullError"}, 429, "queue_full", {"retry-after": "1"}),
        ({"error_kind": "DeadlineExceededError"}, 504, "deadline_exceeded", {"x-should-retry": "false"}),
        ({"error_kind": "InvalidRequestError"}, 400, None, {}),
        ({"error_kind": "ContextLengthError"}, 400, "context_length_exceeded", {}),
        ({}, 500, None, {"x-should-retry": "false"}),
    ],
)
def test_a_refusal_has_its_status_streamed_or_not(
    server: Server, http: httpx.Client, path: str, stream: bool,
    failure: dict[str, Any], status: int, code: str | None, headers: dict[str, str],
) -> None:  # fmt: skip
    server.engine_client.pause_at, server.engine_client.failure = 0, {"error": "because", **failure}
    response = post(http, path, stream=stream, n=2)
    assert response.status_code == status
    error = response.json()["error"]
    message = "Rate limit reached: because" if status == 429 else "because"
    if code == "context_length_exceeded":
        message += " (context_length_exceeded)"
    assert (error["message"], error["code"]) == (message, code)
    assert sorted(error) == ["code", "message", "param", "type"]
    assert {name: response.headers.get(name) for name in headers} == headers


def test_the_official_client_knows_the_refusals(server: Server, sdk: openai.OpenAI) -> None:
    client = server.engine_client
    client.pause_at, client.failure = 0, {"error": "full", "error_kind": "QueueFullError", "retry_after_s": 2}
    with pytest.raises(openai.RateLimitError) as raised:
        sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    assert raised.value.code == "queue_full"


def test_a_deadline_inside_a_stream_is_an_error_event(server: Server, sdk: openai.OpenAI) -> None:
    client = server.engine_client
    client.pause_at, client.failure = 3, {"error": "time is over", "error_kind": "DeadlineExceededError"}
    text = ""
    with pytest.raises(openai.APIError, match="time is over") as raised:
        for chunk in sdk.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert (text, raised.value.code) == ("Hel", "deadline_exceeded")


CHAT_ONLY, COMPLETIONS_ONLY = ("/v1/chat/completions",), ("/v1/completions",)
BOTH = CHAT_ONLY + COMPLETIONS_ONLY
FUNCTION = {"name": "f"}


@pytest.mark.parametrize(
    ("paths", "fields", "param", "words", "own_name"),
    [
        (BOTH, {"n_predict": -5}, "n_predict", "n_predict must be an integer", "max_tokens"),
        (BOTH, {"n_predict": 10**6}, "n_predict", "or lower n_predict", "max_tokens"),
        (BOTH, {"n_predict": 3, "min_tokens": 5}, "min_tokens", "must not be above n_predict (3)", "max_tokens"),
        (BOTH, {"n_predict": 0, "use_beam_search": True}, "n_predict", "needs n_predict of at least", "max_tokens"),
        (CHAT_ONLY, {"max_completion_tokens": -5}, "max_completion_tokens", "tokens must be", " max_tokens"),
        (BOTH, {"n_probs": 99}, "n_probs", "n_probs must be an integer", "logprobs"),
        (CHAT_ONLY, {"logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs must be", " logprobs"),
        (BOTH, {"repeat_penalty": 99}, "repeat_penalty", "repeat_penalty must be a number", "repetition_penalty"),
        (CHAT_ONLY, {"reasoning_budget": -9}, "reasoning_budget", "reasoning_budget must be", "thinking"),
        (
            CHAT_ONLY, {"thinking": {"type": "enabled", "budget_tokens": -9}}, "thinking.budget_tokens",
            "thinking.budget_tokens must be", "thinking_budget",
        ),
        (CHAT_ONLY, {"functions": [FUNCTION] * 200}, "functions", "functions must have at most", "tools"),
        (CHAT_ONLY, {"functions": [FUNCTION, {"name": "a b"}]}, "functions[1].name", "[1].name must be", "tool"),
        (CHAT_ONLY, {"functions": [{"name": "tools b"}]}, "functions[0].name", "got 'tools b'", "tools["),
        (CHAT_ONLY, {"functions": [FUNCTION], "function_call": {"name": "g"}}, "function_call", "names 'g'", "tool"),
        (BOTH, {"guided_json": {"type": "x"}}, "guided_json", "guided_json cannot be honoured", "structured_outputs"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_an_error_has_the_name_that_the_client_has_sent(
    http: httpx.Client, paths: tuple[str, ...], fields: dict[str, Any], param: str, words: str, own_name: str
) -> None:
    for path in paths:
        response = post(http, path, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert words in error["message"] and own_name not in error["message"]


def test_a_failure_in_the_engine_has_the_name_that_the_client_has_sent(server: Server, http: httpx.Client) -> None:
    for name, form in (("guided_regex", "a+"), ("response_format", {"type": "json_object"})):
        post(http, "/v1/completions", **{name: form})
        assert server.engine_client.requests[-1].constraint["param"] == name
