"""The API's routes over a fake engine, called without a socket, with any settings and any API key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagewick.errors import PagewickError
from pagewick.server.api.admission import Admission
from pagewick.server.api.text_routes import TextApi
from pagewick.server.app import DIALECTS
from pagewick.server.core.core import Core
from pagewick.server.errors import ApiError, api_error
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.metrics import Metrics
from pagewick.server.telemetry.request_log import RequestLog
from tests.fake_engine import FakeClient, fake_engine

MODEL = "org/fake-model"
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]

_Result = TypeVar("_Result")


class Api:
    """`client` controls the fake engine. Each call of `run` has an event loop and an application of its own."""

    def __init__(self, **settings: Any) -> None:
        self.client = FakeClient()
        self.settings = ServerSettings(**{"served_model_name": (MODEL,), **settings})

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[_Result]]) -> _Result:
        async def main() -> _Result:
            transport = httpx.ASGITransport(_as_key(self._app()), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await work(http)

        return asyncio.run(main())

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.run(lambda http: http.post(path, json=fields))

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(CHAT, **{"messages": HELLO, **fields})

    def chat_events(self, **fields: Any) -> list[Any]:
        return events_of(self.chat(stream=True, **fields))

    @property
    def prompt(self) -> str:
        """The text of the latest request's prompt."""
        engine = fake_engine(self.client)
        return engine.decode(self.client.requests[-1].prompt_token_ids)

    def _app(self) -> Starlette:
        engine = fake_engine(self.client)
        log = RequestLog(self.settings, Metrics(MODEL, engine.info, lambda: engine.stats))
        core, admission = Core(engine, self.settings, log), Admission(engine)
        routes = [route for dialect in DIALECTS for route in dialect(core, admission).routes()]
        routes += TextApi(engine, self.settings).routes()
        kinds = (HTTPException, ApiError, PagewickError)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _answer_error))


def events_of(response: httpx.Response) -> list[Any]:
    """Return the data of every event but the last, [DONE]."""
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def _as_key(app: Starlette) -> Any:
    """Stand in for access control: the header's value becomes the client's key."""

    async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
        scope["pagewick.key"] = dict(scope["headers"]).get(b"x-test-key", b"").decode()
        await app(scope, receive, send)

    return with_key


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    return JSONResponse(answer.body, answer.status, answer.headers)
