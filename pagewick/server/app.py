"""The HTTP application: its routes, and what stands around every request."""

from __future__ import annotations

import re
import uuid

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.async_llm import AsyncEngine
from pagewick.errors import EngineDeadError, PagewickError
from pagewick.log import get_logger
from pagewick.server.errors import ApiError, api_error
from pagewick.server.lifecycle import Doorkeeper, Lifecycle
from pagewick.server.metrics import Metrics
from pagewick.server.openai import OpenAIApi
from pagewick.server.settings import ServerSettings

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Exception stands for all others, which Starlette raises on when they are answered.
_EXPECTED = (HTTPException, ApiError, PagewickError, ClientDisconnect, Exception)

_logger = get_logger(__name__)


def build_app(engine: AsyncEngine, settings: ServerSettings, lifecycle: Lifecycle | None = None) -> ASGIApp:
    """The application: routes, and every error as OpenAI's body."""
    metrics = Metrics(settings.model_name, engine.info, lambda: engine.stats)
    api = OpenAIApi(engine, settings.model_name, metrics, keep_alive_s=settings.sse_keep_alive_interval)

    async def health(request: Request) -> Response:
        if not engine.is_alive:
            raise EngineDeadError("the engine is not running; restart the server")
        return JSONResponse({"status": "ok"})

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type=METRICS_CONTENT_TYPE)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", api.get_model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", show_metrics, methods=["GET"]),
        ],
        exception_handlers=dict.fromkeys(_EXPECTED, _answer_error),
    )
    return stand_around(Doorkeeper(app, lifecycle or Lifecycle()), settings)


def stand_around(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """The application with what every request passes first, whether the model is loaded or not."""
    return Border(app)


class Border:
    """Around every request: an x-request-id, also in the scope, and an answer whatever goes wrong."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope["pagewick.request_id"] = request_id
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        # The last border: nothing a request does may end in silence or take others with it.
        except Exception as error:
            if api_error(error).status == 500:
                _logger.error("request %s failed", request_id, exc_info=error)
            if not is_started:
                response = await _answer_error(Request(scope), error)
                await response(scope, receive, send_with_id)


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    return JSONResponse(answer.body, answer.status, answer.headers)


def _request_id(given: str | None) -> str:
    """The client's id if it is short and plain, else one of ours."""
    if given is not None and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII):
        return given
    return uuid.uuid4().hex
