"""The server's process: the socket, the engine, HTTP, and how they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from pagewick.async_llm import AsyncEngine, with_local_models
from pagewick.config import EngineConfig
from pagewick.engine.messages import ModelInfo
from pagewick.errors import ConfigError
from pagewick.log import get_logger
from pagewick.server.app import ErrorBoundary, build_app, stand_around
from pagewick.server.guard.access import check_exposure
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.guard.open_files import allow_open_files
from pagewick.server.http_server import HttpServer
from pagewick.server.lifecycle import Lifecycle, Stage, loading
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.throughput import report_throughput
from pagewick.server.telemetry.tracing import Tracing

# Of a server that is not told otherwise: whoever comes later had better ask another one.
MAX_WAITING_REQUESTS = 1024
# How long answers that were cut short have to reach their clients.
LAST_ANSWERS_S = 0.5

OnReady = Callable[[str, ModelInfo], None]

_logger = get_logger(__name__)


def run_server(config: EngineConfig, settings: ServerSettings, *, on_ready: OnReady | None = None) -> None:
    """Serve a model until SIGINT or SIGTERM, then return. SIGHUP reads the file of API keys again.

    While the model loads, requests are told to come again. The first signal lets requests in flight go on for
    settings.shutdown_timeout seconds, after which they get an error; a second one ends that at once.
    on_ready is called with the address once requests are answered.
    Raises ConfigError for settings that cannot be, or that would let anybody in; if the address cannot be had; and what
    AsyncEngine.start raises.
    """
    keys = ApiKeys.load(settings)
    check_exposure(settings, keys)
    allow_open_files(settings)
    chat_template = None if settings.chat_template is None else _read_template(Path(settings.chat_template))
    tracing = None if settings.otlp_endpoint is None else Tracing(settings)
    with _closing(tracing), _listening_socket(settings.host, settings.port) as listener:
        # Here and not in the event loop, so that Ctrl-C ends a download.
        config = with_local_models(config)
        if config.max_waiting_requests is None:
            config = replace(config, max_waiting_requests=MAX_WAITING_REQUESTS)
        server = _Server(config, settings, listener, on_ready, keys=keys, chat_template=chat_template, tracing=tracing)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run())


class _Server:
    """One run of the server: HTTP, then the engine; at the end the engine, then HTTP."""

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        listener: socket.socket,
        on_ready: OnReady | None,
        *,
        keys: ApiKeys,
        chat_template: str | None,
        tracing: Tracing | None,
    ) -> None:
        self._config = config
        self._settings = settings
        self._listener = listener
        self._on_ready = on_ready
        self._keys = keys
        self._chat_template = chat_template
        self._tracing = tracing
        self._stage = Stage(ErrorBoundary(stand_around(loading, settings, keys)))
        self._lifecycle = Lifecycle()

    async def run(self) -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        http = HttpServer(self._stage, self._settings)
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        try:
            starting = AsyncEngine.start(
                self._config, chat_template=self._chat_template, hang_timeout_s=self._settings.hang_timeout
            )
            engine = await _first(starting, stop.wait())
            if isinstance(engine, AsyncEngine):
                await self._serve(engine, serving, stop, hurry)
        finally:
            http.leave()
            await serving

    async def _serve(
        self, engine: AsyncEngine, serving: asyncio.Task[None], stop: asyncio.Event, hurry: asyncio.Event
    ) -> None:
        num_kv_blocks = engine.info.num_kv_blocks
        reporting = asyncio.create_task(report_throughput(lambda: engine.stats, num_kv_blocks=num_kv_blocks))
        try:
            self._stage.app = build_app(
                engine,
                self._settings,
                self._lifecycle,
                keys=self._keys,
                tracing=self._tracing,
                max_waiting_requests=self._config.max_waiting_requests,
            )
            self._announce(engine)
            await _first(asyncio.shield(serving), stop.wait())
            self._lifecycle.drain()
            drained = self._lifecycle.until_idle()
            await _first(asyncio.shield(serving), hurry.wait(), drained, asyncio.sleep(self._settings.shutdown_timeout))
        finally:
            reporting.cancel()
            await engine.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lifecycle.until_idle(), LAST_ANSWERS_S)

    def _announce(self, engine: AsyncEngine) -> None:
        host, port = self._listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._on_ready is not None:
            self._on_ready(address, engine.info)

    def _reload_keys(self) -> None:
        try:
            self._keys.reload()
        except ConfigError as error:
            _logger.error("the API keys stay as they are: %s", error)
        else:
            _logger.info("read the API keys again")


@contextlib.contextmanager
def _closing(tracing: Tracing | None) -> Iterator[None]:
    """Send the last traces, however the server ends."""
    try:
        yield
    finally:
        if tracing is not None:
            tracing.close()


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the chat template {file}: {reason}") from None


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
