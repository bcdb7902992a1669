"""Clients of HTTP/1.0, which know no chunked encoding: old load testers, nginx's default for upstream servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine
from tests.server.raw_http import Answer, RawServer

SETTINGS = ServerSettings(served_model_name=("m",))
CHAT = "/v1/chat/completions"
STREAM: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def server(client: FakeClient, request: pytest.FixtureRequest) -> Iterator[RawServer]:
    with RawServer(build_app(fake_engine(client), SETTINGS), SETTINGS, is_uvloop=request.param) as running:
        yield running


def ask(server: RawServer, method: str, path: str, version: str, fields: dict[str, Any] | None = None) -> Answer:
    """Ask once, until the server closes the connection; with HTTP/1.0 it does so whatever the client wants."""
    body = b"" if fields is None else json.dumps(fields).encode()
    wish = "keep-alive" if version == "1.0" else "close"
    lines = [
        f"{method} {path} HTTP/{version}",
        "Host: 127.0.0.1",
        f"Content-Length: {len(body)}",
        f"Connection: {wish}",
    ]
    return server.talk("\r\n".join([*lines, "", ""]).encode() + body)


def events(answer: Answer) -> list[str]:
    assert answer.status == 200 and not {"transfer-encoding", "content-length"} & answer.headers.keys()
    return [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]


@pytest.mark.parametrize("text", ["Hello 😀!", "a\r\n\r\n0\r\n\r\nb" * 400], ids=["short", "long"])
def test_a_stream_has_no_chunks(server: RawServer, client: FakeClient, text: str) -> None:
    client.texts = [text]
    answer = ask(server, "POST", CHAT, "1.0", {**STREAM, "stream_options": {"include_usage": True}})
    *chunks, end = events(answer)
    assert (end, answer.headers["connection"]) == ("[DONE]", "close")
    pieces = [choice["delta"].get("content") or "" for one in chunks for choice in json.loads(one)["choices"]]
    assert "".join(pieces) == text
    # Its successor has chunks.
    answer = ask(server, "POST", CHAT, "1.1", STREAM)
    assert answer.headers["transfer-encoding"] == "chunked" and answer.body.endswith(b"\r\n0\r\n\r\n")


def test_an_error_inside_a_stream_reaches_the_client(server: RawServer, client: FakeClient) -> None:
    client.pause_at, client.failure = 3, {"error": "time is over", "error_kind": "DeadlineExceededError"}
    assert any("time is over" in event for event in events(ask(server, "POST", CHAT, "1.0", STREAM)))


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", CHAT, {**STREAM, "stream": False}), ("POST", CHAT, {"messages": []}), ("GET", "/v1/models", None),
        ("GET", "/nowhere", None), ("GET", "/", None),
    ],
)  # fmt: skip
def test_other_responses_are_those_of_any_client(
    server: RawServer, method: str, path: str, fields: dict[str, Any] | None
) -> None:
    old, new = (ask(server, method, path, version, fields) for version in ("1.0", "1.1"))
    assert (old.status, old.headers["content-length"]) == (new.status, new.headers["content-length"])
    assert "transfer-encoding" not in old.headers
