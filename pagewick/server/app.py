"""The HTTP application: its routes, and the middleware around them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.async_llm import AsyncEngine
from pagewick.engine.health import EngineHealth
from pagewick.errors import PagewickError
from pagewick.log import get_logger
from pagewick.server.api.adapters import AdaptersApi
from pagewick.server.api.admission import Admission
from pagewick.server.api.anthropic.dialect import AnthropicApi
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.llama_cpp.dialect import LlamaCppApi
from pagewick.server.api.ollama.dialect import OllamaApi
from pagewick.server.api.openai import OpenAIApi
from pagewick.server.api.operation import Operation, describes
from pagewick.server.api.prefill import PrefillApi
from pagewick.server.api.responses_api.routes import ResponsesApi
from pagewick.server.api.text_routes import TextApi
from pagewick.server.core.conversations import ConversationStore, LocalConversations
from pagewick.server.core.core import Core
from pagewick.server.core.stored_responses import LocalResponses, ResponseStore
from pagewick.server.core.tool_rounds import ServerTools
from pagewick.server.errors import ERROR_ANSWER, REQUEST_ID, ApiError, api_error
from pagewick.server.guard.access import Access, ResponseHeaders, open_paths
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.health import health_routes
from pagewick.server.lifecycle import Doorkeeper, Lifecycle
from pagewick.server.openapi import openapi_route
from pagewick.server.page_routes import page_routes
from pagewick.server.settings import ServerSettings
from pagewick.server.tally import Tally
from pagewick.server.telemetry.http_metrics import HttpMetrics, handler_of
from pagewick.server.telemetry.metrics import Metrics
from pagewick.server.telemetry.request_log import RequestLog
from pagewick.server.telemetry.tracing import IncomingTraces, Tracing

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The supported APIs, each with routes of its own.
DIALECTS: tuple[type[Dialect], ...] = (
    OpenAIApi, ResponsesApi, AnthropicApi, OllamaApi, LlamaCppApi, AdaptersApi, PrefillApi,
)  # fmt: skip

# Exception stands for all others, which Starlette raises again after it has answered them.
_EXPECTED = (HTTPException, ApiError, PagewickError, ClientDisconnect, Exception)

_NO_BATCHES = "batches are not supported over HTTP; pagewick complete --batch FILE runs a file of requests"
_NO_UPDATES = "adapters stay as they were at the start; start the server with --allow-runtime-lora-updating"
_NO_MODELS = "models are not made or removed over HTTP; pagewick models does so with those on this disk"
_ONE_MODEL = "this server has one model, which stays loaded; one with --models-dir or --models-preset has several"
_USE_CHATS = "send POST /v1/chat/completions instead"
# Beginning of the paths of another server's routes -> what the 404 says about them.
_NOT_SERVED = {
    "/v1/responses/": "responses run in the foreground only; close the connection of one to cancel it",
    "/v1/audio/": "sound is not supported yet: models here read text and images, and write text",
    "/v1/images/": "images are not made here; models that read some find them in the messages of a chat",
    **dict.fromkeys(("/v1/batches", "/v1/messages/batches", "/v1/files"), _NO_BATCHES),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _NO_UPDATES),
    **dict.fromkeys(("/models/load", "/models/unload"), _ONE_MODEL),
    "/lora-adapters": "GET /v1/models lists adapters, and a request names its adapter as its model",
    **dict.fromkeys(("/api/create", "/api/copy", "/api/delete", "/api/push", "/api/blobs"), _NO_MODELS),
    "/api/": "there is no such route; of Ollama's API this server has /api/chat, /api/generate, /api/embed, "
    "/api/embeddings, /api/tags, /api/ps, /api/show, /api/pull and /api/version",
}

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The state that all requests of a server share. Several processes or models may answer them."""

    conversations: ConversationStore
    responses: ResponseStore
    text_jobs: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Common(Stores):
    """The parts that an API process has in common with the others of its server.

    metrics: its own measurements. render_metrics: returns those of the server.
    """

    metrics: Metrics
    render_metrics: Callable[[], Awaitable[bytes]]


def build_app(
    engine: AsyncEngine,
    settings: ServerSettings,
    lifecycle: Lifecycle | None = None,
    *,
    keys: ApiKeys | None = None,
    tracing: Tracing | None = None,
    max_waiting_requests: int | None = None,
    dialects: Sequence[type[Dialect]] = DIALECTS,
    common: Common | None = None,
    tools: ServerTools | None = None,
) -> ASGIApp:
    """Return the application. It answers every error in the form of the request's dialect, or in OpenAI's.

    keys: None takes those of settings and environment. max_waiting_requests: the engine's limit, so that a request that
    it would refuse is refused before any work is done. common: None: there is one API process. tools: those that the
    server runs itself. Raises ConfigError for invalid hosts, origins or keys.
    """
    lifecycle = lifecycle or Lifecycle()
    common = common or _common_of(engine, settings)
    request_log = RequestLog(settings, common.metrics, tracing)
    keys = ApiKeys(settings) if keys is None else keys
    table = [
        *api_routes(engine, settings, common, request_log, max_waiting_requests, dialects, tools),
        *server_routes(settings, lifecycle, lambda: engine.health, common.render_metrics),
    ]
    app = guarded(table, settings, lifecycle, keys, tracing)
    return ErrorBoundary(HttpMetrics(app, common.metrics, request_log), dialects)


def api_routes(
    engine: AsyncEngine,
    settings: ServerSettings,
    stores: Stores,
    request_log: RequestLog,
    max_waiting_requests: int | None,
    dialects: Sequence[type[Dialect]] = DIALECTS,
    tools: ServerTools | None = None,
) -> list[Route]:
    """Return the routes of one model. Nothing of the engine is read before a request comes."""
    admission = Admission(engine, max_waiting_requests, text_jobs=stores.text_jobs)
    core = Core(engine, settings, request_log, stores.conversations, stores.responses, tools)
    of_dialects = [route for dialect in dialects for route in dialect(core, admission).routes()]
    return [*of_dialects, *TextApi(engine, settings, admission).routes()]


def server_routes(
    settings: ServerSettings,
    lifecycle: Lifecycle,
    health: Callable[[], EngineHealth],
    render_metrics: Callable[[], Awaitable[bytes]],
) -> list[Route]:
    """Return the routes that are about the server itself."""
    return [
        *health_routes(health, lambda: lifecycle.is_draining),
        Route("/metrics", partial(_show_metrics, render_metrics), methods=["GET"]),
        *page_routes(settings),
    ]


def guarded(
    table: Sequence[Route], settings: ServerSettings, lifecycle: Lifecycle, keys: ApiKeys, tracing: Tracing | None
) -> ASGIApp:
    """Return routes, and their description, behind the checks that every request passes first."""
    if settings.docs:
        table = [*table, openapi_route(table, open_paths=open_paths(settings), has_keys=bool(keys))]
    routes = routed(table)
    return with_access_control(
        Doorkeeper(routes if tracing is None else IncomingTraces(routes), lifecycle), settings, keys
    )


def routed(table: Sequence[Route]) -> ASGIApp:
    """Return an application of these routes, which answers errors."""
    routes = Starlette(
        routes=table,
        exception_handlers={**dict.fromkeys(_EXPECTED, _answer_error), 404: _answer_not_found, 405: _answer_method},
    )
    # A redirect would repeat the host that the client named.
    routes.router.redirect_slashes = False
    return routes


def _common_of(engine: AsyncEngine, settings: ServerSettings) -> Common:
    """Return what the only API process of a server needs."""
    metrics = Metrics(settings.model_name, engine.info, lambda: engine.stats, health=lambda: engine.health)

    async def render() -> bytes:
        return metrics.render()

    return Common(
        metrics=metrics,
        render_metrics=render,
        conversations=LocalConversations(engine.session_ttl_s),
        responses=LocalResponses(),
        text_jobs=Tally(),
    )


def with_access_control(app: ASGIApp, settings: ServerSettings, keys: ApiKeys) -> ASGIApp:
    """Put an application behind the checks that every request passes first, whether the model is loaded or not."""
    return ResponseHeaders(Access(app, settings, keys), settings)


@describes(Operation(tag="Server", response=METRICS_CONTENT_TYPE))
async def _show_metrics(render: Callable[[], Awaitable[bytes]], request: Request) -> Response:
    """Return metrics for Prometheus."""
    return Response(await render(), media_type=METRICS_CONTENT_TYPE)


class ErrorBoundary:
    """Gives every request an x-request-id, also in its scope, and a response even if an exception gets this far.

    An error has the form of the dialect that the path belongs to, wherever the request is refused.
    """

    def __init__(self, app: ASGIApp, dialects: Sequence[type[Dialect]] = DIALECTS) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope[REQUEST_ID] = request_id
        names = {"x-request-id"}
        if (dialect := next((one for one in self._dialects if one.owns(scope["path"])), None)) is not None:
            scope[ERROR_ANSWER] = dialect.error_answer
            names.add(dialect.id_header)
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message).update(dict.fromkeys(names, request_id))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        # No request may end without a response or disturb other requests.
        except Exception as error:
            if api_error(error).status == 500:
                _logger.error("request %s failed", request_id, exc_info=error)
            if not is_started:
                await api_error(error).response(scope)(scope, receive, send_with_id)


async def _answer_error(request: Request, error: Exception) -> Response:
    return api_error(error).response(request.scope)


async def _answer_not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == HTTPStatus.NOT_FOUND.phrase:
        path = request.scope["path"]
        usual = "there is no such route; those of OpenAI's API begin with /v1/, as /v1/chat/completions does, so that "
        usual += "the base URL of a client ends in /v1"
        if path.startswith("/v1/"):
            usual = "there is no such route; those that begin with /v1/ are /v1/chat/completions, /v1/completions, "
            usual += "/v1/embeddings, /v1/classify, /v1/rerank, /v1/score, /v1/responses, /v1/messages, /v1/models and "
            usual += "/v1/sessions/{id}"
        found = (text for begin, text in _NOT_SERVED.items() if path.startswith(begin))
        error = HTTPException(404, next(found, usual))
    return await _answer_error(request, error)


async def _answer_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # This names the route as it stands in the table: nothing that the client wrote is repeated.
    *others, last = sorted((error.headers or {}).get("Allow", "").replace(" ", "").split(","))
    allowed = f"{', '.join(others)} or {last}" if others else last
    message = f"{handler_of(request.scope)} does not take this method; send the request with {allowed}"
    return await _answer_error(request, HTTPException(405, message, headers=error.headers))


def _request_id(given: str | None) -> str:
    """Return the client's id if it is short and plain, else a new one."""
    if given is not None and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII):
        return given
    return uuid.uuid4().hex
