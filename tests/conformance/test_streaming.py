"""Points 12 and 42 to 55: streams, and how they end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.callers import END, Caller, error_of, forcing, user
from tests.conformance.conftest import KEY
from tests.conformance.servers import DEADLINE_S, MODEL, Server, until

CHAT = "/v1/chat/completions"
QUESTION = [user("Which port does the server listen on by default?")]
STRANGE = [user("Repeat xqz")]
SHORT = {"messages": QUESTION, "max_tokens": 2}
LONG = {"messages": QUESTION, "max_tokens": 2000, "ignore_eos": True, "stream": True}

# Requests whose streams take different paths through the server; the first three end at their maximum length.
KINDS: dict[str, dict[str, Any]] = {
    "cut": {"max_tokens": 4},
    "nothing": {"max_tokens": 0},
    "two cut": {"n": 2, "max_tokens": 3, "temperature": 1, "seed": 3, "extra_body": {"ignore_eos": True}},
    "plain": {"temperature": 0},
    "two": {"messages": STRANGE, "n": 2, "temperature": 1, "seed": 1},
    "log-probabilities": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    "thoughts": {"forced": "<think> because</think> Four"},
    "emoji": {"forced": "😀"},
    "stopped": {"temperature": 0, "stop": "8000"},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def fields(kind: str, server: Server) -> dict[str, Any]:
    more = KINDS[kind]
    if "forced" in more:
        more = forcing([*server.tokens(more["forced"]), END])
    return {"messages": QUESTION, **more}


@pytest.fixture(scope="package")
def seen() -> dict[str, Any]:
    """Streams that several tests examine."""
    return {}


@pytest.fixture
def chunks(seen: dict[str, Any], caller: Caller, kind: str, fields: dict[str, Any]) -> list[Any]:
    """The chunks of one stream of the kind, as the client gives them."""
    name = f"{kind} {type(caller.client).__name__}"
    if name not in seen:
        seen[name] = caller.chat_chunks(**fields)
    found: list[Any] = seen[name]
    return found


@pytest.fixture
def wire(seen: dict[str, Any], server: Server, kind: str, fields: dict[str, Any]) -> list[str]:
    """The data of one stream's events, as sent."""
    if kind not in seen:
        seen[kind] = events(server, fields)
    found: list[str] = seen[kind]
    return found


def events(server: Server, fields: dict[str, Any]) -> list[str]:
    """Return the data of a stream's events, as sent."""
    more = fields.get("extra_body", {})
    body = {"model": MODEL, "stream": True, **fields, **more}
    body.pop("extra_body", None)
    text = server.http.post(CHAT, json=body).text
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_point_42_role(chunks: list[Any], fields: dict[str, Any]) -> None:
    """The first chunk of a choice has the role, and no later chunk has it."""
    roles: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            roles.setdefault(choice.index, []).append(choice.delta.role)
    assert sorted(roles) == list(range(fields.get("n", 1)))
    for found in roles.values():
        assert found[0] == "assistant" and not any(found[1:])


def test_point_43_same_in_all_chunks(chunks: list[Any], wire: list[str]) -> None:
    """id, created, model and object are the same in all chunks."""
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].id != json.loads(wire[0])["id"]


def test_point_44_one_finish_reason(chunks: list[Any], kind: str, fields: dict[str, Any]) -> None:
    """Each choice has one finish reason, in its last chunk."""
    reasons: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
    assert len(reasons) == fields.get("n", 1)
    for found in reasons.values():
        assert found[-1] == ("length" if kind in list(KINDS)[:3] else "stop")
        assert not any(found[:-1])


def test_point_45_done(wire: list[str]) -> None:
    """[DONE] is the last event and occurs once."""
    assert wire[-1] == "[DONE]" and wire.count("[DONE]") == 1
    assert all(json.loads(data)["object"] == "chat.completion.chunk" for data in wire[:-1])


def test_point_46_no_usage_unless_asked(server: Server, wire: list[str]) -> None:
    """Without include_usage there is no usage, and no chunk without choices."""
    asked = [events(server, {"stream_options": options, **SHORT}) for options in (None, {}, {"include_usage": False})]
    for found in (wire, *asked):
        for data in found[:-1]:
            chunk = json.loads(data)
            assert chunk["choices"] and chunk.get("usage") is None


def test_point_47_usage(server: Server, caller: Caller, fields: dict[str, Any]) -> None:
    """With include_usage the last chunk has it and no choices; it is null in the others."""
    found = [json.loads(data) for data in events(server, {**fields, "stream_options": {"include_usage": True}})[:-1]]
    assert found[-1]["choices"] == [] and all(chunk["choices"] for chunk in found[:-1])
    assert all("usage" in chunk and chunk["usage"] is None for chunk in found[:-1])
    usage = caller.chat(**fields).usage
    assert usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found[-1]["usage"][name] == getattr(usage, name)


def test_point_48_stream_options_without_stream(caller: Caller) -> None:
    """stream_options without stream give 400."""
    with pytest.raises(openai.BadRequestError) as failure:
        caller.chat(stream_options={"include_usage": True})
    assert error_of(failure.value)["param"] == "stream_options"


def _num_different(caller: Caller, fields: dict[str, Any]) -> int:
    return len({choice.message.content for choice in caller.chat(**fields).choices})


def test_point_49_interleaved_choices(caller: Caller) -> None:
    """The chunks of two choices are interleaved; the client assembles both."""
    sampled = ({"messages": STRANGE, "n": 2, "temperature": 1, "seed": seed} for seed in range(1, 20))
    fields = next(fields for fields in sampled if _num_different(caller, fields) == 2)
    # Texts that are long enough for several chunks each, also on a busy machine, where a chunk has several tokens.
    chunks = caller.chat_chunks(**fields, max_tokens=100, extra_body={"ignore_eos": True})
    order = [choice.index for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert 0 in order[order.index(1) :], order
    first = list(dict.fromkeys(choice.index for chunk in chunks for choice in chunk.choices))
    assert first == [0, 1]
    made = caller.accumulated(**fields)
    whole = caller.chat(**fields)
    assert [choice.message.content for choice in made.choices] == [one.message.content for one in whole.choices]
    assert len({choice.message.content for choice in made.choices}) == 2


def test_point_50_accumulated(caller: Caller, kind: str, fields: dict[str, Any]) -> None:
    """The client accumulates the same response from a stream as it gets without one."""
    if kind in list(KINDS)[:3]:
        with pytest.raises(openai.LengthFinishReasonError) as failure:
            caller.accumulated(**fields)
        made = failure.value.completion
    else:
        made = caller.accumulated(**fields)
    whole = caller.chat(**fields)
    # The client drops fields of a chunk's choice that it does not know, such as vLLM's stop_reason.
    differing: Any = {"id": True, "created": True, "usage": True, "choices": {"__all__": {"stop_reason"}}}
    accumulated = made.model_dump(exclude=differing, exclude_none=True)
    assert accumulated == whole.model_dump(exclude=differing, exclude_none=True)


def test_point_51_no_empty_deltas(wire: list[str]) -> None:
    """Every chunk between the role and the finish reason has content."""
    chunks = [json.loads(data) for data in wire[:-1]]
    begun = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] in begun and choice["finish_reason"] is None:
                assert any(choice["delta"].get(name) for name in ("content", "reasoning_content")), choice
            begun.add(choice["index"])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_point_52_headers(server: Server, path: str) -> None:
    """A stream's headers declare an event stream and ask proxies to pass it on at once."""
    body = {"messages": QUESTION, "prompt": "Hi", "max_tokens": 2, "stream": True}
    body.pop("prompt" if path == CHAT else "messages")
    with server.http.stream("POST", path, json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "no-cache" in response.headers["cache-control"]
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers and "content-encoding" not in response.headers
        response.read()


def test_point_53_keep_alive_comments(guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """Comments keep a waiting stream open; clients ignore them."""
    waiting = {"messages": QUESTION, "temperature": 0, "stream": True}
    with guarded.http.stream("POST", CHAT, json=LONG), guarded.http.stream("POST", CHAT, json=waiting) as raw:
        lines = raw.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
    caller = new_caller(guarded.url, key=KEY)
    with guarded.http.stream("POST", CHAT, json={**LONG, "max_tokens": 100}):
        chunks = caller.chat_chunks(messages=QUESTION, temperature=0)
    assert "8000" in "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_point_54_error_in_a_stream(guarded: Server, new_caller: Callable[..., Caller]) -> None:
    """When the engine dies during a stream, the client raises APIError, and the connection is closed properly."""
    caller = new_caller(guarded.url, key=KEY)
    stream = caller.begin(messages=QUESTION, max_tokens=2000, extra_body={"ignore_eos": True})
    with guarded.http.stream("POST", CHAT, json={"messages": QUESTION, "stream": True}) as waiting:
        lines = waiting.iter_lines()
        assert next(lines) == ": ping"
        guarded.engine().kill()
        with pytest.raises(openai.APIError) as failure:
            caller.rest_of(stream)
        # The stream is complete, without an HTTP error.
        rest = [line for line in lines if line.startswith("data:")]
    # Not one of its subclasses, which mean a broken connection.
    assert type(failure.value) is openai.APIError
    body = failure.value.body
    assert isinstance(body, dict) and sorted(body) == ["code", "message", "param", "type"]
    assert [json.loads(line.removeprefix("data: ")) for line in rest] == [{"error": body}]
    with pytest.raises(openai.InternalServerError) as refusal:
        caller.chat(max_tokens=1)
    assert error_of(refusal.value)["code"] == body["code"] == "engine_dead"
    assert refusal.value.status_code == 503
    assert 0 < int(refusal.value.response.headers["retry-after"]) <= 120
    until(lambda: guarded.http.get("/health").status_code == 200)
    assert "8000" in (caller.chat(messages=QUESTION, temperature=0).choices[0].message.content or "")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may stop."""
    server = Server(tmp_path / "log", "--shutdown-timeout", "50")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_point_12_draining(own_server: Server) -> None:
    """A server that is stopping gives 503 with Retry-After and lets running requests finish."""
    made = [Caller(own_server.url, None) for _ in range(2)]
    stream = made[0].begin(messages=QUESTION, max_tokens=1000, extra_body={"ignore_eos": True})
    own_server.process.send_signal(signal.SIGTERM)
    until(lambda: own_server.http.get("/health").status_code == 503)
    with pytest.raises(openai.InternalServerError) as refusal:
        made[1].chat(max_tokens=1)
    assert refusal.value.status_code == 503
    assert error_of(refusal.value)["code"] == "draining"
    assert 0 < int(refusal.value.response.headers["retry-after"]) <= 120
    assert made[0].rest_of(stream)[-1].choices[0].finish_reason == "length"
    assert own_server.process.wait(DEADLINE_S) == 0
    for caller in made:
        caller.close()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_point_55_a_client_that_leaves(server: Server, caller: Caller, is_streamed: bool) -> None:
    """When a client closes its stream, or its connection while it waits, the request is aborted."""
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "pagewick:kv_blocks_referenced")
    if is_streamed:
        stream = caller.begin(messages=QUESTION, max_tokens=2000, extra_body={"ignore_eos": True})
        assert server.metric(gauges[0]) == 1
        caller.leave(stream)
    else:
        with pytest.raises(openai.APITimeoutError):
            caller.chat(messages=QUESTION, max_tokens=2000, extra_body={"ignore_eos": True}, timeout=0.5)
    until(lambda: not any(server.metric(name) for name in gauges))
