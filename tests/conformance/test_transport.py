"""Points 1 to 18: transport and errors."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import zstandard

from tests.conformance.callers import Caller, Way, error_of, user
from tests.conformance.conftest import KEY, ORIGIN, OTHER_KEY
from tests.conformance.servers import MODEL, Server, until

CHAT = "/v1/chat/completions"
SHORT = {"model": MODEL, "messages": [user("Hi")], "max_tokens": 1}
LONG = {**SHORT, "stream": True, "max_tokens": 2000, "ignore_eos": True}
CONTEXT = 2048


def body_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return a response's error object, after a check of its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    error: dict[str, Any] = body["error"]
    assert list(body) == ["error"] and sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["message"] and error["type"]
    return error


def test_point_01_wrong_path(caller: Caller, server: Server) -> None:
    """A wrong path gives 404 with an error object."""
    with pytest.raises(openai.NotFoundError) as failure:
        caller.request("get", "/nothing/here")
    assert error_of(failure.value)["type"] == "invalid_request_error"
    body_error(server.http.post("/nothing"), 404)


def test_point_02_wrong_method(server: Server) -> None:
    """A wrong method gives 405 and names the allowed methods."""
    for path, allowed in ((CHAT, {"POST"}), ("/v1/completions", {"POST"}), ("/v1/models", {"GET", "HEAD"})):
        response = server.http.delete(path)
        assert body_error(response, 405)["code"] == "method_not_allowed"
        assert set(response.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": ',
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{'messages': []}",
        b'{"messages": [],}',
        b'{"model": "\xff"}',
        b"{}{}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
def test_point_03_malformed_json(server: Server, path: str, body: bytes) -> None:
    """A body that is not a JSON object gives 400 with an error object."""
    response = server.http.post(path, content=body, headers={"content-type": "application/json"})
    error = body_error(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", None)


def test_point_04_missing_messages(caller: Caller) -> None:
    """A request without messages gives 400, and the error names them."""
    with pytest.raises(openai.BadRequestError) as failure:
        caller.request("post", "/chat/completions", {"model": MODEL})
    assert failure.value.param == "messages"
    assert "messages" in error_of(failure.value)["message"]
    with pytest.raises(openai.BadRequestError) as failure:
        caller.request("post", "/completions", {"model": MODEL})
    assert failure.value.param == "prompt"


def test_point_05_unknown_model(way: Way) -> None:
    """An unknown model gives 404 and the code model_not_found."""
    for ask in (way.chat, lambda **fields: way.completion(prompt="Hi", **fields)):
        with pytest.raises(openai.NotFoundError) as failure:
            ask(model="gpt-none")
        error = error_of(failure.value)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-none" in error["message"]


def test_point_06_no_key_or_a_wrong_one(guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """A missing or wrong key gives 401, the code invalid_api_key and WWW-Authenticate."""
    for key in ("sk-wrong", KEY[:-1], KEY + "x", KEY.upper()):
        with pytest.raises(openai.AuthenticationError) as failure:
            new_caller(guarded.url, key=key).chat(max_tokens=1)
        assert error_of(failure.value)["code"] == "invalid_api_key"
        assert failure.value.response.headers["www-authenticate"] == "Bearer"
        assert key not in failure.value.response.text
    for path in (CHAT, "/v1/models", "/tokenize", "/metrics", "/nothing"):
        response = guarded.anonymous.post(path, json=SHORT)
        assert body_error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert new_caller(guarded.url, key=OTHER_KEY).chat(max_tokens=1).choices


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_point_07_x_api_key(guarded: Server, key: str) -> None:
    """A key is accepted in x-api-key as well as in Authorization."""
    for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}):
        assert guarded.anonymous.post(CHAT, json=SHORT, headers=headers).status_code == 200
    assert guarded.anonymous.post(CHAT, json=SHORT, headers={"x-api-key": "wrong"}).status_code == 401


WRONG_REQUESTS: list[tuple[str, str, Any, int]] = [
    ("GET", "/nothing", None, 404),
    ("GET", CHAT, None, 405),
    ("POST", CHAT, {}, 400),
    ("POST", CHAT, {**SHORT, "model": "x"}, 404),
    ("POST", CHAT, {**SHORT, "n": 0}, 400),
    ("POST", CHAT, {**SHORT, "messages": []}, 400),
    ("POST", CHAT, {**SHORT, "tools": [{"type": "unknown"}]}, 400),
    ("POST", CHAT, {**SHORT, "messages": [user("word " * CONTEXT)]}, 400),
    ("POST", "/v1/completions", {"prompt": ""}, 400),
    ("POST", "/detokenize", {"tokens": [-1]}, 400),
    ("GET", "/v1/models/x", None, 404),
    ("GET", "/v1/sessions/x", None, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), WRONG_REQUESTS)
def test_point_08_codes_are_strings(server: Server, method: str, path: str, body: Any, status: int) -> None:
    """An error's code is a string or null."""
    body_error(server.http.request(method, path, json=body), status)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version", "/", "/nothing", CHAT])
def test_point_09_request_ids(server: Server, path: str) -> None:
    """Every response has an x-request-id: the client's own if it is short and plain."""
    for given in ("my-id_1.2:3", "x" * 128):
        assert server.http.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given
    made = {server.http.get(path).headers["x-request-id"] for _ in range(2)}
    for given in ("", "x" * 129, "two words", 'quo"te', "a,b"):
        made.add(server.http.get(path, headers={"x-request-id": given}).headers["x-request-id"])
    assert len(made) == 7 and all(re.fullmatch(r"[0-9a-f]{32}", one) for one in made)


def test_point_09_request_ids_in_the_client(caller: Caller, server: Server) -> None:
    """The client shows the id, for streams and errors too."""
    response = caller.chat(max_tokens=1, extra_headers={"x-request-id": "own-1"})
    assert response._request_id == "own-1"
    with pytest.raises(openai.BadRequestError) as failure:
        caller.chat(max_tokens=-1, extra_headers={"x-request-id": "own-2"})
    assert failure.value.request_id == "own-2"
    with server.http.stream("POST", CHAT, json={**SHORT, "stream": True}, headers={"x-request-id": "own-3"}) as stream:
        assert stream.headers["x-request-id"] == "own-3"


def test_point_10_too_long_a_prompt(way: Way, server: Server) -> None:
    """A prompt beyond the context gives 400, the code context_length_exceeded and the words that clients know."""
    for ask in (
        lambda: way.chat(messages=[user("word " * CONTEXT)]),
        lambda: way.completion(prompt="word " * CONTEXT),
        lambda: way.completion(prompt=[5] * (CONTEXT + 1)),
    ):
        with pytest.raises(openai.BadRequestError) as failure:
            ask()
        error = error_of(failure.value)
        assert error["code"] == "context_length_exceeded"
        assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
        # No byte of a stream was sent.
        assert failure.value.response.headers["content-type"] == "application/json"


@contextmanager
def load(guarded: Server, num_streams: int) -> Iterator[Callable[[], None]]:
    """Keep `num_streams` requests running or waiting; yields a function that ends them."""
    with ExitStack() as streams:
        for count in range(1, num_streams + 1):
            streams.enter_context(guarded.http.stream("POST", CHAT, json=LONG))
            # The engine's numbers come with its next step.
            until(partial(lambda number: in_engine(guarded) == number, count))
        yield streams.close
    until(lambda: in_engine(guarded) == 0)


def in_engine(server: Server) -> float:
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")


def test_point_11_overload(guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """A full queue gives 429 with Retry-After; the client's own retries succeed when the load ends."""
    for _ in range(32):  # Retry-After is estimated from the rate of finished requests.
        assert guarded.http.post(CHAT, json=SHORT).status_code == 200
    patient = new_caller(guarded.url, key=KEY, max_retries=2)
    with load(guarded, 2) as end:
        for is_streamed in (False, True):
            with pytest.raises(openai.RateLimitError) as failure:
                Way(new_caller(guarded.url, key=KEY), is_streamed).chat(max_tokens=1)
            assert "rate limit" in error_of(failure.value)["message"].lower()
            assert 1 <= int(failure.value.response.headers["retry-after"]) <= 120
        num_refusals = guarded.metric("pagewick:queue_refusals_total")

        def end_when_refused() -> None:
            until(lambda: guarded.metric("pagewick:queue_refusals_total") > num_refusals)
            end()

        ending = threading.Thread(target=end_when_refused)
        ending.start()
        try:
            assert patient.chat(max_tokens=1).choices[0].finish_reason == "length"
        finally:
            ending.join()
    assert guarded.metric("pagewick:queue_refusals_total") > num_refusals


def test_point_13_too_large_a_body(guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """A body beyond the limit gives 413 with an error object, whether its length was announced or not."""
    with pytest.raises(openai.APIStatusError) as failure:
        new_caller(guarded.url, key=KEY).chat(messages=[user("x" * 2**16)])
    assert failure.value.status_code == 413
    assert error_of(failure.value)["code"] == "request_too_large"
    pieces = (b" " * 2**12 for _ in range(32))
    assert body_error(guarded.http.post(CHAT, content=pieces), 413)["code"] == "request_too_large"
    fitting = json.dumps(SHORT).encode().ljust(2**16)
    assert guarded.http.post(CHAT, content=fitting).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "x; charset=x", None])
def test_point_14_wrong_content_type(server: Server, content_type: str | None) -> None:
    """A body is read as JSON whatever its content type says."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.http.post(CHAT, content=json.dumps(SHORT), headers=headers)
    assert response.json()["choices"][0]["finish_reason"] == "length"


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_point_15_compressed_bodies(guarded: Server, encoding: str) -> None:
    """gzip and zstd bodies are read; one that would become too large gives 413."""
    compress = COMPRESSORS[encoding]
    headers = {"content-encoding": encoding}
    response = guarded.http.post(CHAT, content=compress(json.dumps(SHORT).encode()), headers=headers)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    bomb = compress(json.dumps(SHORT).encode() + b" " * 10**7)
    assert len(bomb) < 2**16
    assert body_error(guarded.http.post(CHAT, content=bomb, headers=headers), 413)["code"] == "request_too_large"
    unknown = guarded.http.post(CHAT, content=b"x", headers={"content-encoding": "br"})
    assert body_error(unknown, 415)["code"] == "unsupported_content_encoding"


def test_point_16_cors_preflight(guarded: Server, server: Server) -> None:
    """A preflight without a key succeeds for the allowed origin only."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for path in (CHAT, "/v1/models"):
        allowed = guarded.anonymous.options(path, headers={"origin": ORIGIN, **asked})
        assert allowed.is_success
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert set(allowed.headers["access-control-allow-headers"].split(",")) == {"authorization", "content-type"}
    for target in (guarded, server):
        refused = target.anonymous.options(CHAT, headers={"origin": "https://other.example", **asked})
        body_error(refused, 403)
        assert "access-control-allow-origin" not in refused.headers
    response = guarded.http.post(CHAT, json=SHORT, headers={"origin": ORIGIN})
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in response.headers


def test_point_17_one_connection_for_1000_calls(server: Server) -> None:
    """One connection serves a thousand calls, with errors and streams among them."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.connect()
    kept = connection.sock
    kept.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for number in range(1000):
        match number % 50:
            case 10:
                connection.request("POST", CHAT, json.dumps({**SHORT, "stream": number % 100 == 10}))
            case 20:
                connection.request("POST", CHAT, "{")
            case 30:
                connection.request("GET", "/nothing")
            case _:
                connection.request("GET", "/v1/models")
        response = connection.getresponse()
        assert response.read()
        assert response.status == {20: 400, 30: 404}.get(number % 50, 200)
        assert connection.sock is kept
    connection.close()


def test_point_18_unknown_fields(way: Way, server: Server, guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """An unknown field is accepted and logged, and named in a header; a strict server refuses it."""
    fields = {"frobnicate": 1, "max_tokns": 5}
    assert way.chat(max_tokens=1, extra_body=fields).finish_reason == "length"
    response = server.http.post(CHAT, json={**SHORT, **fields})
    assert response.headers["x-pagewick-ignored"] == "frobnicate, max_tokns"
    assert "ignored request fields: frobnicate, max_tokns" in server.log.read_text(encoding="utf-8")
    strict = Way(new_caller(guarded.url, key=KEY), way.is_streamed)
    with pytest.raises(openai.BadRequestError) as failure:
        strict.chat(max_tokens=1, extra_body=fields)
    assert error_of(failure.value)["param"] == "frobnicate"
    assert "did you mean max_tokens?" in failure.value.message
    assert strict.chat(max_tokens=1, extra_body={"top_k": 5, "min_p": 0.1}).finish_reason == "length"
