"""Checks every exchange of an HTTP client with the server against the description of the API, /openapi.json.

A request that is accepted must fit the schema of its route, and so must every response, every event of a stream and
every error. The description comes from the test's own process; test_openapi.py compares it with the servers'.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine

Json = dict[str, Any]
JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"
LINES_TYPE = "application/x-ndjson"


@functools.cache
def document() -> Json:
    app = build_app(fake_engine(FakeClient()), ServerSettings(served_model_name=("m",)))
    described: Json = TestClient(app, base_url="http://127.0.0.1").get("/openapi.json").json()
    return described


def check_exchange(response: Any, body: bytes) -> None:
    """Raise AssertionError unless a response with this body, and its request if it was accepted, are as described."""
    request = response.request
    operation = _operation(request)
    if response.status_code == 200 and operation is not None:
        _check_request(request, operation)
    answers = {} if operation is None else operation["responses"]
    answer = answers.get(str(response.status_code)) or _errors_below(request.url.path)
    content = (_resolved(answer) if "$ref" in answer else answer)["content"]
    media_type = response.headers.get("content-type", "").partition(";")[0]
    if response.status_code in (204, 304) or request.method == "HEAD":
        return
    assert media_type in content or "*/*" in content, f"{request.url.path}: {media_type} is not described"
    schema = content.get(media_type, {}).get("schema")
    if schema is not None:
        for value in _values(body, media_type):
            _check(value, schema, f"the response of {request.url.path}")


def watch(client: Any) -> None:
    """Check all exchanges of a client, of httpx or httpx2, when their responses have been read to the end."""

    def check(response: Any) -> None:
        # The client expects a subclass of its own library's streams.
        kind = type("Watched", (_Watched, *type(response.stream).__bases__), {})
        response.stream = kind(response.stream, functools.partial(check_exchange, response))

    async def check_later(response: Any) -> None:
        check(response)

    client.event_hooks = {"request": [], "response": [check_later if hasattr(client, "aclose") else check]}


class _Watched:
    """A response's stream that calls on_end with all of its bytes, if it is read to its end."""

    def __init__(self, stream: Any, on_end: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._on_end = on_end
        self._read = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._read += piece
            yield piece
        self._on_end(bytes(self._read))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._read += piece
            yield piece
        self._on_end(bytes(self._read))

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _operation(request: Any) -> Json | None:
    """Return the operation of a request; None if there is no such route."""
    # The longest path that fits counts: an id may have slashes.
    for path, methods in sorted(document()["paths"].items(), key=lambda one: len(one[0]), reverse=True):
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(path))
        if re.fullmatch(pattern, request.url.path) and request.method.lower() in methods:
            found: Json = methods[request.method.lower()]
            return found
    return None


def _errors_below(path: str) -> Json:
    """Return how errors look that no operation describes: as those of the nearest path above, if there is one."""
    above = [known for known in document()["paths"] if f"{path}/".startswith(f"{known}/")]
    if path.startswith("/api/"):
        above.append("/api/tags")
    if not above:
        return {"$ref": "#/components/responses/InternalServerError"}
    found: Json = next(iter(document()["paths"][max(above, key=len)].values()))["responses"]["default"]
    return found


def _check_request(request: Any, operation: Json) -> None:
    if "requestBody" not in operation or "content-encoding" in request.headers:
        return
    try:
        body = request.content
    except RuntimeError:
        return  # It was sent in pieces, which only one test does, about their sizes.
    schema = operation["requestBody"]["content"][JSON_TYPE]["schema"]
    _check(json.loads(body), schema, f"the request to {request.url.path}")


def _values(body: bytes, media_type: str) -> Iterator[Any]:
    if media_type == STREAM_TYPE:
        return _events(body)
    return map(json.loads, body.splitlines() if media_type == LINES_TYPE else [body])


def _events(body: bytes) -> Iterator[Any]:
    for line in body.decode().split("\n\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _resolved(reference: Json) -> Json:
    found: Json = document()["components"]["responses"][reference["$ref"].rpartition("/")[2]]
    return found


def _check(value: Any, schema: Json, what: str) -> None:
    faults = [
        f"{error.json_path}: {error.message[:300]}" for error in _validator(json.dumps(schema)).iter_errors(value)
    ]
    assert not faults, f"{what} is not as described: {'; '.join(faults)}"


@functools.cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({**json.loads(schema), "components": document()["components"]})
