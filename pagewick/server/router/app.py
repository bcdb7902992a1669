"""The application of a server with several models: it passes each request to the model that the request names."""

from __future__ import annotations

import asyncio
from inspect import ismethod
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.engine.health import EngineHealth
from pagewick.errors import EngineDeadError, InvalidRequestError, NotEnoughMemoryError
from pagewick.log import get_logger
from pagewick.server.api.decoding import decode_request
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.framing import DialectFraming
from pagewick.server.api.json_response import json_response
from pagewick.server.api.known_fields import KnownFields
from pagewick.server.api.operation import Operation, describes, handler_and_operation
from pagewick.server.api.responses import ModelCard, ModelList
from pagewick.server.api.sse import run_while_connected
from pagewick.server.app import ErrorBoundary, api_routes, guarded, server_routes
from pagewick.server.errors import ERROR_CODE, ApiError, api_error
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.guard.body import read_body
from pagewick.server.lifecycle import RETRY_AFTER_S, Lifecycle
from pagewick.server.router import pool
from pagewick.server.router.loading import ServedModel, Together
from pagewick.server.router.models import Routed, RoutedModels
from pagewick.server.router.ollama import OllamaModels
from pagewick.server.router.opening import Opening
from pagewick.server.router.pool import LoadFailedError, ModelPool
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.http_metrics import COUNTED_BELOW, LATE_STATUS, HttpMetrics
from pagewick.server.telemetry.metric_sums import families_of, rendered, summed
from pagewick.server.telemetry.metrics import HttpCounts, process_registry
from pagewick.server.telemetry.request_log import RefusalLog

# Seconds that a request waits for its model: time for a large one, while a download may take longer.
LOAD_WAIT_S = 600.0
_logger = get_logger(__name__)

_LISTS = ("/v1/models", "/v1/models/{id:path}")
_POOL = Operation(tag="Several models", errors=(404,))
_ANY_FIELD = KnownFields(unsupported={})
# The label of requests that were refused before their model was known.
_NO_MODEL = ""


class _Asked(msgspec.Struct):
    """The part of a body that says which model responds, and how. stream: as it stands there; it may be anything."""

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw()


class ModelRequest(msgspec.Struct, kw_only=True):
    """model: a name of the model."""

    model: str


class PoolResponse(msgspec.Struct, kw_only=True):
    success: bool = True


def build_router(
    models: RoutedModels, together: Together, settings: ServerSettings, lifecycle: Lifecycle, keys: ApiKeys
) -> ASGIApp:
    """Return the application. settings: the server's; each model has its own."""
    registry = process_registry()
    counts = HttpCounts(_NO_MODEL, registry)

    async def render() -> bytes:
        return rendered(summed([families_of(registry), models.families()]))

    routes = _PoolRoutes(models, settings)
    own = {route.path: route for route in (*routes.routes(), *OllamaModels(models, settings).routes())}
    table = [*own.values(), *(_routed(route, models, settings) for route in _model_routes(together, settings))]
    table = [route for route in table if own.get(route.path, route) is route]
    table += server_routes(settings, lifecycle, lambda: EngineHealth("ready"), render)
    app = guarded(table, settings, lifecycle, keys, together.tracing)
    return ErrorBoundary(HttpMetrics(app, counts, RefusalLog(settings)))


class Forward:
    """An endpoint that passes requests to the application of the model that they name.

    The field `model` of the body names it, or the query parameter `model`. dialect: None if the endpoint has no
    streams.
    """

    def __init__(
        self,
        operation: Operation | None,
        doc: str | None,
        dialect: Dialect | None,
        models: RoutedModels,
        settings: ServerSettings,
    ) -> None:
        self.operation = operation
        self.__doc__ = doc
        self._dialect = dialect
        self._models = models
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        # Each model has its own limit; this is that of the most generous one.
        body = await read_body(request, self._settings, reads_images=True)
        asked = _asked_in(body)
        model = await self._find(asked.model, request.query_params.get("model"))
        pool = self._models.pool
        unloading = None if self._dialect is None else self._dialect.unloading(request.url.path, body)
        if unloading is not None:
            # No request of another client is cut short, nor one that waits for the model to be loaded.
            if model.state != "loading":
                await run_while_connected(request, pool.unload(model))
            await unloading(scope, receive, send)
            return
        is_loaded = model.state in ("loaded", "loading")
        if not (is_loaded or self._models.entry_of(model).settings.models_autoload):
            message = f"the model {model.name!r} is not loaded; load it with POST /models/load"
            raise ApiError(400, message, param="model", code="model_not_loaded")
        opening = Opening(self._framing(asked), self._settings.sse_keep_alive_interval, send)
        try:
            async with opening.pings():
                loaded = await run_while_connected(request, _within(LOAD_WAIT_S, pool, model))
        except Exception as error:
            if not opening.is_begun:
                raise
            # Whatever went wrong: Starlette cannot answer a response that has begun.
            await self._end(opening, error, scope)
            return
        try:
            inner = _with_plain_body(scope, body)
            # The model's own metrics count what it refuses.
            scope[COUNTED_BELOW] = True
            await loaded.app(inner, _Replay(body, receive), opening.send)
        finally:
            scope[LATE_STATUS] = opening.late_status
            pool.release(model)

    async def _end(self, opening: Opening, error: Exception, scope: Scope) -> None:
        """End a stream whose model could not be loaded, unless its client has left."""
        failure = api_error(error)
        scope[LATE_STATUS], scope[ERROR_CODE] = failure.status, failure.code
        if isinstance(error, ClientDisconnect):
            return
        if not isinstance(error, ApiError):
            _logger.error("a model could not be loaded for a stream", exc_info=error)
        await opening.fail(failure)

    def _framing(self, asked: _Asked) -> DialectFraming | None:
        """Return the framing of the stream that the request asks for; None if it asks for none."""
        dialect = self._dialect
        if dialect is None:
            return None
        wanted = bytes(asked.stream).strip()
        is_stream = dialect.streams_by_default if wanted in (b"", b"null") else wanted == b"true"
        return dialect.framing if is_stream else None

    async def _find(self, in_body: str | None, in_query: str | None) -> Routed:
        model = await self._models.find(in_body if in_body is not None else in_query)
        if None not in (in_body, in_query) and await self._models.find(in_query) is not model:
            raise InvalidRequestError(
                "the body and the query name different models; leave one of them out", param="model"
            )
        return model


class _Replay:
    """Receives a body that has been read already, and then what else the client sends."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _PoolRoutes:
    """The routes that list, load and unload models; the last two are llama.cpp's."""

    def __init__(self, models: RoutedModels, settings: ServerSettings) -> None:
        self._models = models
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.list_models, methods=["GET"]) for path in (_LISTS[0], "/models")),
            Route(_LISTS[1], self.get_model, methods=["GET"]),
            Route("/models/load", self.load, methods=["POST"]),
            Route("/models/unload", self.unload, methods=["POST"]),
        ]

    @describes(replace(_POOL, response=ModelList))
    async def list_models(self, request: Request) -> Response:
        """List all models, loaded or not, under each of their names."""
        return json_response(ModelList(await self._models.cards()))

    @describes(replace(_POOL, response=ModelCard))
    async def get_model(self, request: Request) -> Response:
        """Describe a model. A path that ends with the slash lists the models."""
        name = request.path_params["id"]
        return await self.list_models(request) if not name else json_response(await self._models.card(name))

    @describes(replace(_POOL, request=ModelRequest, response=PoolResponse, errors=(404, 500)))
    async def load(self, request: Request) -> Response:
        """Load a model, and answer once it is loaded."""
        model, ignored = await self._read(request)
        pool = self._models.pool
        await run_while_connected(request, _within(LOAD_WAIT_S, pool, model))
        pool.release(model)
        return json_response(PoolResponse(), ignored)

    @describes(replace(_POOL, request=ModelRequest, response=PoolResponse))
    async def unload(self, request: Request) -> Response:
        """Unload a model. Its running requests get the server's --shutdown-timeout to finish."""
        model, ignored = await self._read(request)
        await self._models.pool.unload(model, self._settings.shutdown_timeout)
        return json_response(PoolResponse(), ignored)

    async def _read(self, request: Request) -> tuple[Routed, list[str]]:
        raw = await read_body(request, self._settings)
        body, ignored = decode_request(raw, ModelRequest, strict=self._settings.strict, known=_ANY_FIELD)
        return await self._models.find(body.model), ignored


async def _within(seconds: float, models: ModelPool[ServedModel], model: Routed) -> ServedModel:
    """Return a model once it is loaded. Raises ApiError if it is not within some seconds, or cannot be."""
    try:
        async with asyncio.timeout(seconds):
            return await models.acquire(model)
    except TimeoutError:
        message = f"the model {model.name!r} is still loading after {seconds:g} seconds; try again later"
        headers = {"retry-after": str(RETRY_AFTER_S)}
        error = ApiError(503, message, type="service_unavailable_error", code="loading", headers=headers)
    except LoadFailedError as failed:
        _logger.debug("a request for %s fails", model.name, exc_info=failed)
        error = _load_error(model, failed.failure)
    raise error


def _load_error(model: Routed, failure: Exception) -> ApiError:
    """Return the response to requests for a model that could not be loaded. It names no reason, nor a path."""
    message = f"the model {model.name!r} could not be loaded; the server's log says why"
    if isinstance(failure, EngineDeadError | NotEnoughMemoryError):
        # Another attempt may succeed. The reasons of an engine's end name no path either.
        message = f"{message.partition(';')[0]}: {failure}" if isinstance(failure, EngineDeadError) else message
        headers = {"retry-after": str(int(pool.RETRY_AFTER_S))}
        return ApiError(503, message, type="service_unavailable_error", code="model_load_failed", headers=headers)
    headers = {"x-should-retry": "false"}
    return ApiError(500, message, type="server_error", code="model_load_failed", headers=headers)


def _asked_in(body: bytes) -> _Asked:
    """Return what a body asks for. Raises InvalidRequestError if it is not JSON."""
    try:
        return msgspec.json.decode(body, type=_Asked)
    except msgspec.ValidationError:
        raise InvalidRequestError("model must be a text: a name of a model", param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode_request(body, _Asked, known=_ANY_FIELD)[0]


def _with_plain_body(scope: Scope, body: bytes) -> Scope:
    """Return the scope of a request whose body has been decompressed."""
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-encoding", b"content-length")]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


def _routed(route: Route, models: RoutedModels, settings: ServerSettings) -> Route:
    """Return a route that passes requests on, if they have a body; what has none needs no model."""
    handler, operation = handler_and_operation(route.endpoint)
    if operation is None or operation.request is None:
        return route
    methods = sorted((route.methods or set()) - {"HEAD"})
    owner = handler.__self__ if ismethod(handler) else None
    dialect = owner if operation.chunk and isinstance(owner, Dialect) else None
    return Route(route.path, Forward(operation, handler.__doc__, dialect, models, settings), methods=methods)


def _model_routes(together: Together, settings: ServerSettings) -> list[Route]:
    """Return the routes of any model, which tell their paths; those without a body can be called."""
    # Handlers that need an engine, or measure requests, have a body: they are never called.
    nobody: Any = None
    return api_routes(nobody, settings, together, nobody, None)
