"""The served description is the one that all other tests of this folder are checked against, and the check can fail."""

from __future__ import annotations

import httpx
import pytest

from tests.conformance.described import check_exchange, document, watch
from tests.conformance.servers import MODEL, Server


def test_servers_serve_this_description(server: Server, guarded: Server) -> None:
    assert server.http.get("/openapi.json").json() == document()
    assert guarded.anonymous.get("/openapi.json").status_code == 401
    locked = guarded.http.get("/openapi.json").json()
    assert locked["components"]["schemas"] == document()["components"]["schemas"]
    assert locked["security"] == [{"bearer": []}, {"header": []}]


def exchange(path: str, request: object, status: int, body: bytes, media_type: str = "application/json") -> None:
    made = httpx.Request("POST", f"http://127.0.0.1{path}", json=request)
    check_exchange(httpx.Response(status, request=made, headers={"content-type": media_type}), body)


def test_the_check_finds_faults() -> None:
    good = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    error = b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'
    exchange("/v1/chat/completions", {"messages": 1}, 400, error)
    exchange("/v1/nothing", {}, 404, error)
    exchange("/detokenize", {"tokens": [1]}, 200, b'{"prompt": "a", "content": "a"}')
    faulty = [
        ("/detokenize", {"tokens": ["1"]}, 200, b'{"prompt": "a", "content": "a"}', "application/json"),
        ("/detokenize", {"tokens": [1]}, 200, b'{"prompt": 1, "content": "a"}', "application/json"),
        ("/detokenize", {"tokens": [1]}, 200, b'{"prompt": "a"}', "application/json"),
        ("/detokenize", {"tokens": [1]}, 200, b"<p>", "text/html"),
        ("/v1/chat/completions", {**good, "temperature": 3}, 200, b"{}", "application/json"),
        ("/v1/chat/completions", good, 400, b'{"error": "m"}', "application/json"),
        ("/v1/chat/completions", good, 200, b'data: {"id": 1}\n\ndata: [DONE]\n\n', "text/event-stream"),
    ]
    for path, request, status, body, media_type in faulty:
        with pytest.raises(AssertionError):
            exchange(path, request, status, body, media_type)


def test_a_watched_client_checks_streams_when_they_end() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        pieces = iter([b'data: {"i', b'd": 1}\n\n'])
        return httpx.Response(200, content=pieces, headers={"content-type": "text/event-stream"})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1")
    watch(client)
    with pytest.raises(AssertionError, match="not as described"):
        client.post("/v1/completions", json={"prompt": "x", "stream": True})
