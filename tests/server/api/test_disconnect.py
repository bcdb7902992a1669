"""A client that leaves at any time frees its request."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, Server

HELLO = [{"role": "user", "content": "hi"}]


def send_and_leave(server: Server, body: dict[str, object], path: str = "/v1/chat/completions") -> None:
    """Send a request, wait until the engine has stopped in the middle of it, and close the connection."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    num_paused = server.engine_client.num_paused
    with socket.create_connection(server.address) as connection:
        connection.sendall(head + content)
        server.until(lambda: server.engine_client.num_paused > num_paused)
        assert server.engine_client.running


@pytest.mark.parametrize("pause_at", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_leaving_aborts_the_request_with_all_its_choices(
    server: Server, path: str, stream: bool, n: int, pause_at: int
) -> None:
    server.engine_client.pause_at = pause_at
    text: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    send_and_leave(server, {**text, "stream": stream, "n": n}, path)
    server.until(lambda: len(server.engine_client.aborted) == 1)
    assert not server.engine_client.running and not server.engine_client.finished


def test_the_official_client_closes_a_stream(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.pause_at = 4
    stream = sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True)
    next(iter(stream))
    stream.close()
    server.until(lambda: len(server.engine_client.aborted) == 1)


def test_leaving_in_the_middle_of_the_body(server: Server) -> None:
    with socket.create_connection(server.address) as connection:
        connection.sendall(
            b'POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{"messages"'
        )
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not server.engine_client.requests


def test_others_are_not_harmed(server: Server, http: httpx.Client) -> None:
    server.engine_client.pause_at = 2
    with http.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        send_and_leave(server, {"messages": HELLO, "stream": True})
        server.until(lambda: len(server.engine_client.aborted) == 1)
        server.engine_client.go_on()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert len(server.engine_client.finished) == 1
