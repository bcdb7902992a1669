"""Errors of requests have OpenAI's shape and do not affect other requests."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.server.api.decoding import decode_request
from pagewick.server.api.known_fields import UNSUPPORTED
from pagewick.server.api.protocol import ChatCompletionRequest, CompletionRequest
from pagewick.server.api.text_routes import DetokenizeRequest, TokenizeRequest
from pagewick.server.core.limits import MAX_JSON_DEPTH, MAX_JSON_PARTS, check_nesting
from pagewick.server.core.sampling import bias_texts, sampling_params
from pagewick.server.settings import TEXT_BODY_SIZE
from tests.server.conftest import MODEL, Server

HELLO = [{"role": "user", "content": "hi"}]


def refused(response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """Check an error body, and return its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    message: str = error["message"]
    assert message and "Traceback" not in message and "/home" not in message
    return message


def test_wrong_path_and_method(http: httpx.Client, sdk: openai.OpenAI) -> None:
    for path in ("/v1/nothing", "/chat/completions", "/embeddings"):
        message = refused(http.post(path), 404, code="not_found")
        assert "begin with /v1/" in message and path not in message.replace("/v1/chat/completions", "")
    for path in ("/v1/moderations", "/v1/chat/completions/"):
        message = refused(http.post(path), 404, code="not_found")
        served = (
            "chat/completions",
            "completions",
            "embeddings",
            "classify",
            "responses",
            "messages",
            "models",
            "sessions/{id}",
        )
        assert all(f"/v1/{name}" in message for name in served)
    assert "no such file" in refused(http.get("/page/nothing.js"), 404, code="not_found")
    response = http.get("/v1/chat/completions")
    message = refused(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert message.startswith("/v1/chat/completions does not take this method") and message.endswith("POST")
    assert "/v1/models/{id:path} " in refused(http.put("/v1/models/my-model"), 405, code="method_not_allowed")
    with pytest.raises(openai.NotFoundError):
        sdk.moderations.create(input="x")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/responses/resp_1/cancel", "responses run in the foreground only"),
        ("/v1/audio/speech", "sound is not supported yet"),
        ("/v1/batches", "pagewick complete --batch FILE"),
        ("/lora-adapters", "a request names its adapter as its model"),
        ("/models/load", "one with --models-dir"),
    ],
)
def test_routes_of_other_apis_are_told_what_is_there(http: httpx.Client, path: str, words: str) -> None:
    message = refused(http.post(path, json={}), 404, code="not_found")
    assert words in message and "no such route" not in message


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"messages": [}', b"\xff\xfe", b'{"model": "\xff"}', b"\xef\xbb\xbf", b'{"temperature": NaN}',
        b'{"messages": [], "x": Infinity}', b'{"x": "\\ud800"}', b"nul", b'{"a":1}{}', b"'a'",
    ],
)  # fmt: skip
def test_malformed_json(http: httpx.Client, body: bytes) -> None:
    assert "not valid JSON" in refused(http.post("/v1/chat/completions", content=body), 400)


def test_a_byte_order_mark_is_no_part_of_the_body(http: httpx.Client) -> None:
    """Programs of Windows write one, compressed or not."""
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for content, headers in ((body, {}), (gzip.compress(body), {"content-encoding": "gzip"})):
        response = http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"messages": [{"role": "user", "content": "a\xff"}]}', "it is not UTF-8 (byte 44)"),
        ('{"messages": []}'.encode("utf-16"), "it is not UTF-8 (byte 0)"),
        (b'{"temperature": NaN}', "invalid character (byte 16)"),
    ],
)
def test_malformed_json_is_located(http: httpx.Client, body: bytes, reason: str) -> None:
    message = refused(http.post("/v1/chat/completions", content=body), 400)
    assert message == f"the body is not valid JSON: {reason}"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: a token id must be an integer from 0 to"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias: a bias must be a number from -100 to 100; got 101.0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids: a token id must be an integer from 0 to"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt", "a request may have at most 1024 choices"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "guided_choice: choice must have 1 to 10000 texts, none of"),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs needs exactly one of json, regex"),
        ({"structured_outputs": {"": 2**64}}, "structured_outputs", "structured_outputs has no ''; it has json, regex"),
    ],
)
def test_a_wrong_entry_is_described(http: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "a"} | fields)
    assert refused(response, 400, param=param).startswith(message)


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null", b"true"])
def test_json_that_is_no_object(http: httpx.Client, body: bytes) -> None:
    assert "the body is not a request" in refused(http.post("/v1/chat/completions", content=body), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO * 2049}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "king", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        ({"model": 3}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"min_p": 1.5}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.5}, "repeat_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias[0]"),
        ({"logit_bias": {"5": None}}, "logit_bias[...]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"stop_token_ids": [*range(65)]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat": 1, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x" * 129]}, "dry_sequence_breakers"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"priority": 2**40}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": -1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": "€" * 86}, "session_id"),
        ({"session_id": 1.5}, "session_id"),
        ({"session_id": True}, "session_id"),
        ({"session_id": 10**300}, "session_id"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1.5}, "timeout"),
        ({"timeout": 86400.1}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_wrong_fields_are_named(server: Server, http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    response = http.post("/v1/chat/completions", content=json.dumps({"messages": HELLO, **fields}))
    code = "unsupported_parameter" if "image_url" in str(fields) else None
    refused(response, 400, param=param, code=code)
    assert not server.engine_client.requests


@pytest.mark.parametrize("value", ["é" * 5000, "x - at `$.model`" * 500])
def test_error_messages_do_not_grow_with_the_request(http: httpx.Client, value: str) -> None:
    body = {"messages": HELLO, "reasoning_format": value}
    message = refused(http.post("/v1/chat/completions", json=body), 400, param="reasoning_format")
    assert message.startswith("reasoning_format: ") and len(message) < 300


@pytest.mark.parametrize(
    ("fields", "param", "values"),
    [
        ({"messages": [*HELLO, {"role": "king", "content": "x"}]}, "messages[1].role",
         "system, developer, user, assistant, tool, function"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max"),
        ({"thinking": {"type": "on"}}, "thinking.type", "adaptive, disabled, enabled"),
    ],
)  # fmt: skip
def test_errors_about_enums_list_the_values(
    http: httpx.Client, fields: dict[str, Any], param: str, values: str
) -> None:
    message = refused(http.post("/v1/chat/completions", json={"messages": HELLO, **fields}), 400, param=param)
    start, _, listed = message.partition("; accepted: ")
    assert start.startswith(f"{param}: Invalid enum value")
    assert sorted(listed.split(", ")) == sorted(values.split(", "))


def test_missing_messages_are_named(http: httpx.Client) -> None:
    message = refused(http.post("/v1/chat/completions", json={"model": MODEL}), 400, param="messages")
    assert message == "messages is missing"
    refused(http.post("/v1/completions", json={"model": MODEL}), 400, param="prompt")


def test_numbers_out_of_range(http: httpx.Client) -> None:
    for text in ("1e309", "-1e309", "9" * 400):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "temperature": {text}}}'
        assert http.post("/v1/chat/completions", content=body).status_code == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
        ("chat_template", "x"),
        ("best_of", 2),
    ],
)
def test_unsupported_fields_are_refused_not_ignored(http: httpx.Client, name: str, value: Any) -> None:
    response = http.post("/v1/chat/completions", json={"messages": HELLO, name: value})
    assert name in refused(response, 400, param=name, code="unsupported_parameter")


def test_unsupported_fields_that_ask_for_nothing_are_accepted(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=[], tool_choice="none", logit_bias={},
        response_format={"type": "text"}, frequency_penalty=0, presence_penalty=0.0, user="me", store=True,
        metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, modalities=["text"],
    )  # fmt: skip
    assert "x-pagewick-ignored" not in raw.headers
    assert sdk.completions.create(model=MODEL, prompt="x", echo=False, best_of=1, suffix="").choices


def test_unknown_fields_are_named_and_harmless(http: httpx.Client) -> None:
    fields = {"temprature": 2, "evil\r\nset-cookie: x": 1, "ü" * 100: {"deep": [1]}}
    response = http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 200
    assert response.headers["x-pagewick-ignored"] == "temprature, evil??set-cookie??x, " + "?" * 64
    assert "set-cookie" not in response.headers
    many = {f"field{i}": i for i in range(1000)}
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **many})
    assert len(response.headers["x-pagewick-ignored"].split(", ")) == 16


def test_unknown_fields_of_stream_options_are_named(sdk: openai.OpenAI) -> None:
    options: list[tuple[dict[str, Any], str | None]] = [
        ({"include_usage": True, "include_obfuscation": False}, None),
        ({"include_usage": True, "continuous_usage_stats": True}, None),
        ({"include_usage": True, "include_reasons": True}, "stream_options.include_reasons"),
    ]
    for stream_options, ignored in options:
        raw = sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, stream=True, extra_body={"stream_options": stream_options}
        )
        assert raw.headers.get("x-pagewick-ignored") == ignored
        assert list(raw.parse())[-1].usage is not None


def test_unknown_model(http: httpx.Client, sdk: openai.OpenAI) -> None:
    for body in ({"model": "gpt-5", "messages": HELLO}, {"model": "", "messages": HELLO}):
        message = refused(http.post("/v1/chat/completions", json=body), 404, param="model", code="model_not_found")
        assert MODEL in message
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("org/other")


def test_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "pagewick")
    assert isinstance(model.created, int)
    assert sdk.models.retrieve(MODEL).to_dict() == model.to_dict()
    assert model.to_dict()["max_model_len"] == 512


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "my-id_1.2:3"}).headers["x-request-id"] == "my-id_1.2:3"
    ids = {http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 129)}
    assert len(ids) == 3 and all(len(request_id) == 32 for request_id in ids)


def test_content_type_does_not_matter(http: httpx.Client) -> None:
    body = json.dumps({"messages": HELLO})
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = http.post("/v1/chat/completions", content=body, headers={"content-type": content_type})
        assert response.status_code == 200


def test_large_body_is_cut_off(http: httpx.Client) -> None:
    fits = json.dumps({"messages": [{"role": "user", "content": ""}]})
    padded = fits[:-1] + " " * (TEXT_BODY_SIZE - len(fits)) + "}"
    assert http.post("/v1/chat/completions", content=padded).status_code == 200
    refused(http.post("/v1/chat/completions", content=padded + " "), 413, code="request_too_large")

    def pieces() -> Any:
        for _ in range(20):
            yield b" " * 2**20

    refused(http.post("/v1/chat/completions", content=pieces()), 413, code="request_too_large")


@pytest.mark.parametrize(
    "opening", [b"[", b'{"a":', b'{"messages":[{"role":"user","content":[', b'{"tools":[', b'"[", [']
)
def test_depth_bomb(http: httpx.Client, opening: bytes) -> None:
    for count in (100, 100_000):
        response = http.post("/v1/chat/completions", content=opening * count)
        assert response.status_code == 400, response.text
    assert http.get("/health").status_code == 200


def test_depth_is_counted_outside_of_strings_only(http: httpx.Client) -> None:
    text = '[{"\\' * 10_000
    assert http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}], "x": text}).is_success
    nested: Any = 1
    for _ in range(MAX_JSON_DEPTH - 1):
        nested = [nested]
    assert http.post("/v1/chat/completions", json={"messages": HELLO, "x": nested}).is_success
    response = http.post("/v1/chat/completions", json={"messages": HELLO, "x": [nested]})
    assert "nested deeper" in refused(response, 400)


@given(st.lists(st.sampled_from([*'[]{}",:', "\\", '\\"', "\\\\", "a", "\n", "[" * 60, "]" * 60]), max_size=24))
def test_nesting_counts_brackets_outside_strings(parts: list[str]) -> None:
    """Compare with a reader of single characters. A backslash outside of strings is never valid JSON."""
    text = "".join(parts)
    depth = deepest = 0
    is_string = is_escaped = False
    for character in text:
        if character == "\\" and not is_string:
            return
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == '"':
            is_string = not is_string
        elif not is_string:
            depth += (character in "[{") - (character in "]}")
            deepest = max(deepest, depth)
    if deepest > MAX_JSON_DEPTH:
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            check_nesting(text.encode())
    else:
        check_nesting(text.encode())


@pytest.mark.parametrize(
    "body", [b"[]" * MAX_JSON_PARTS, b"[]" * 70 + b'"",' * (MAX_JSON_PARTS + 1), b'"":0,' * (MAX_JSON_PARTS + 1)]
)
def test_too_many_parts(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="more than 250000 strings and brackets"):
        check_nesting(body)


def test_one_long_string_is_one_part() -> None:
    check_nesting(b'{"a":"' + b'[\\"' * MAX_JSON_PARTS + b'","b":[]}')


@pytest.mark.parametrize("body", [b"", b" \r\n\t"])
def test_an_empty_body_is_called_empty(http: httpx.Client, body: bytes) -> None:
    assert "it is empty" in refused(http.post("/v1/completions", content=body), 400)
    response = http.post("/v1/chat/completions", content=b"[" + b"[]," * 130_000 + b"1]")
    assert "more than 250000" in refused(response, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KINDS = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = sorted({*UNSUPPORTED, *(name for kind in KINDS for name in kind.__struct_fields__)})


CHAT, COMPLETION = {"messages": HELLO}, {"prompt": "x"}
TEXTS: dict[Any, dict[str, Any]] = {
    ChatCompletionRequest: CHAT,
    CompletionRequest: COMPLETION,
    "v1/chat/completions": CHAT,
    "v1/completions": COMPLETION,
    "tokenize": COMPLETION,
    "detokenize": {"tokens": [1]},
    "apply-template": CHAT,
}
SOME_FIELDS = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5)


@settings(max_examples=60)
@given(
    fields=SOME_FIELDS,
    other=st.none() | st.binary(max_size=64),
    kind=st.sampled_from([ChatCompletionRequest, CompletionRequest]),
)
def test_any_body_is_a_request_or_refused(
    fields: dict[str, Any], other: bytes | None, kind: type[ChatCompletionRequest | CompletionRequest]
) -> None:
    body = json.dumps({**TEXTS[kind], **fields}).encode() if other is None else other
    try:
        request, _ = decode_request(body, kind)
        wanted = request.chat_request() if isinstance(request, ChatCompletionRequest) else request.prompts_request(99)
        spelled = {text: [1] for text in bias_texts(wanted.sampling)}
        params = sampling_params(wanted, SamplingParams(), spelled)
    except InvalidRequestError as error:
        assert str(error)
    else:
        assert 1 <= params.n <= 128 and 0 <= params.temperature <= 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=SOME_FIELDS,
    path=st.sampled_from(["v1/chat/completions", "v1/completions", "tokenize", "detokenize", "apply-template"]),
)
def test_any_json_gets_a_status_below_500(http: httpx.Client, fields: dict[str, Any], path: str) -> None:
    response = http.post(f"/{path}", content=json.dumps({**TEXTS[path], **fields}))
    assert response.status_code in (200, 400, 404), response.text
    assert response.status_code == 200 or response.json()["error"]["message"]


def test_keep_alive_over_many_calls(http: httpx.Client) -> None:
    def local_port() -> int:
        response = http.get("/health")
        assert response.json() == {"status": "ok"}
        address: tuple[str, int] = response.extensions["network_stream"].get_extra_info("client_addr")
        return address[1]

    assert len({local_port() for _ in range(50)}) == 1
