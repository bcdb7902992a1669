"""The HTTP application and the process around it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.async_llm import AsyncEngine, with_local_models
from pagewick.config import EngineConfig
from pagewick.engine.messages import ModelInfo
from pagewick.errors import ConfigError, EngineDeadError
from pagewick.log import get_logger
from pagewick.server.errors import api_error
from pagewick.server.metrics import Metrics
from pagewick.server.openai import OpenAIApi
from pagewick.server.sse import KEEP_ALIVE_S

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Of a server that is not told otherwise: whoever comes later had better ask another one.
MAX_WAITING_REQUESTS = 1024
# How long requests in flight may go on after the first signal.
DRAIN_S = 5.0
SHUTDOWN_GRACE_S = 3
IDLE_CONNECTION_S = 75

OnReady = Callable[[str, ModelInfo], None]

_logger = get_logger(__name__)


def build_app(engine: AsyncEngine, *, served_model_name: str, keep_alive_s: float = KEEP_ALIVE_S) -> Starlette:
    """The application: routes, and every error as OpenAI's body. It serves one model under one name."""
    metrics = Metrics(served_model_name, engine.info, lambda: engine.stats)
    api = OpenAIApi(engine, served_model_name, metrics, keep_alive_s=keep_alive_s)

    async def health(request: Request) -> Response:
        if not engine.is_alive:
            raise EngineDeadError("the engine is not running; restart the server")
        return JSONResponse({"status": "ok"})

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type=METRICS_CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", api.get_model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", show_metrics, methods=["GET"]),
        ],
        middleware=[Middleware(Border)],
        exception_handlers={HTTPException: _answer_error},
    )


class Border:
    """Around every request: an x-request-id, and an answer whatever goes wrong."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
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


def run_server(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    drain_s: float = DRAIN_S,
    on_ready: OnReady | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM, then return.

    The first signal lets requests in flight go on for drain_s seconds, after which they get an error; a second one
    ends that at once. port 0 is any free one. on_ready is called with the address once requests are answered.
    Raises ConfigError if the address cannot be had, and what AsyncEngine.start raises.
    """
    with _listening_socket(host, port) as listener:
        # Here and not in the event loop, so that Ctrl-C ends a download.
        served_model_name = served_model_name or config.model
        config = with_local_models(config)
        if config.max_waiting_requests is None:
            config = replace(config, max_waiting_requests=MAX_WAITING_REQUESTS)
        if host not in LOOPBACK:
            _logger.warning("listening on %s: whoever can reach this address can use the model", host)
        server = _Server(config, served_model_name, listener, on_ready)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run(drain_s))


class _Server:
    """One run of the server: first the engine, then HTTP; at the end the same."""

    def __init__(
        self, config: EngineConfig, served_model_name: str, listener: socket.socket, on_ready: OnReady | None
    ) -> None:
        self._config = config
        self._served_model_name = served_model_name
        self._listener = listener
        self._on_ready = on_ready

    async def run(self, drain_s: float) -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        engine = await _first(AsyncEngine.start(self._config), stop.wait())
        if not isinstance(engine, AsyncEngine):
            return
        http = _HttpServer(self._http_config(engine, drain_s), partial(self._announce, engine))
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        try:
            await _first(asyncio.shield(serving), stop.wait())
            http.should_exit = True
            await _first(asyncio.shield(serving), hurry.wait(), asyncio.sleep(drain_s))
        finally:
            http.should_exit = True
            await engine.close()
            await serving

    def _http_config(self, engine: AsyncEngine, drain_s: float) -> uvicorn.Config:
        return uvicorn.Config(
            build_app(engine, served_model_name=self._served_model_name),
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_S,
            # Only a net: closing the engine ends all requests.
            timeout_graceful_shutdown=int(drain_s) + SHUTDOWN_GRACE_S,
        )

    def _announce(self, engine: AsyncEngine) -> None:
        host, port = self._listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._on_ready is not None:
            self._on_ready(address, engine.info)


class _HttpServer(uvicorn.Server):
    """uvicorn, but the signals are ours and we hear when it is ready."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def _listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket; taken before the model is loaded, so that a wrong address is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = "choose another port with --port" if error.errno == errno.EADDRINUSE else "choose another with --host"
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); {hint}") from None
    return listener


async def _first(*works: Awaitable[Any]) -> Any:
    """The result of the work that is done first; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
