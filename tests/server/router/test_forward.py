"""Forward: what the router reads of a request before the request's model does."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pagewick.server.api.anthropic.dialect import AnthropicApi
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.ollama.dialect import OllamaApi
from pagewick.server.api.ollama.fields import UnloadRequest
from pagewick.server.api.openai import OpenAIApi
from pagewick.server.router.app import Forward
from pagewick.server.router.models import RoutedModels
from pagewick.server.router.pool import ModelPool
from pagewick.server.settings import ServerSettings


class Models:
    """One model under every name, whose application keeps how much memory was taken until it got a request."""

    def __init__(self) -> None:
        self.pool: ModelPool[Any] = ModelPool(max_loaded=1)
        self.peak = 0
        self.body = b""
        self._model = self.pool.add("tiny", cast(Any, self))

    async def find(self, name: str | None) -> Any:
        return self._model

    def entry_of(self, model: Any) -> Any:
        class Entry:
            settings = ServerSettings()

        return Entry

    # The source of the model, and the loaded model.

    async def prepare(self) -> None:
        pass

    async def load(self) -> Models:
        return self

    async def close(self) -> None:
        pass

    @property
    def app(self) -> ASGIApp:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            self.peak = tracemalloc.get_traced_memory()[1]
            self.body = await Request(scope, receive).body()
            await Response("answered")(scope, receive, send)

        return answer


@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        (OpenAIApi, "/v1/chat/completions"),
        (AnthropicApi, "/v1/messages"),
        (OllamaApi, "/api/chat"),
    ],
)
def test_a_long_body_is_passed_on_undecoded(dialect: type[Dialect], path: str) -> None:
    """Objects for all messages would take many times the memory of the body, and block the loop."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 40_000
    body = json.dumps({"messages": messages, "model": "tiny", "stream": True, "keep_alive": 0}).encode()
    models = Models()

    async def main() -> httpx.Response:
        api = dialect.__new__(dialect)
        forward = Forward(None, None, api, cast(RoutedModels, models), ServerSettings())
        transport = httpx.ASGITransport(app=Starlette(routes=[Route(path, forward, methods=["POST"])]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            tracemalloc.start()
            try:
                return await http.post(path, content=body)
            finally:
                tracemalloc.stop()

    assert asyncio.run(main()).text == "answered"
    assert models.body == body
    # The test's copy is not counted; the loop holds one, and a growing buffer while it reads.
    assert models.peak < 3 * len(body)


@pytest.mark.parametrize(
    ("keep_alive", "is_zero"),
    [
        *((zero, True) for zero in (0, 0.0, -0.0, "0", "-0", "0s", "0m0s", "0h", "-0s", "+0h0m0.0s", "0.us", ".00µs")),
        *((kept, False) for kept in (None, 1, -1, 1e-3, "", "5m", "0m1s", "0m0.01s", "-1s", "0x", "0s 0s", "s", ".s")),
    ],
)
def test_a_keep_alive_of_0_unloads(keep_alive: Any, is_zero: bool) -> None:
    """The texts are durations as Go reads them."""
    assert UnloadRequest(keep_alive=keep_alive).only_unloads is is_zero
    answer = OllamaApi.unloading("/api/generate", json.dumps({"model": "m", "keep_alive": keep_alive}).encode())
    assert (answer is not None) is is_zero
