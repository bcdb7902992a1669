"""The server's process: how the socket, the engine and HTTP start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from pagewick.async_llm import AsyncEngine
from pagewick.config import EngineConfig
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ConfigError
from pagewick.local_models import with_local_models
from pagewick.outputs import PartKind
from pagewick.server.app import ErrorBoundary, build_app, with_access_control
from pagewick.server.core.start_warnings import warn_at_start
from pagewick.server.engine_setup import set_up
from pagewick.server.guard.access import check_exposure
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.guard.open_files import allow_open_files
from pagewick.server.http_server import HttpServer
from pagewick.server.lifecycle import LAST_RESPONSES_S, Lifecycle, Stage, first_done, loading, stop_signals
from pagewick.server.listening import address_of, listening
from pagewick.server.remote_prefill import check_prefill
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.engine_metrics import report_throughput
from pagewick.server.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from pagewick.server.mcp.toolbox import Toolbox

# Default of a server. A request that would wait behind this many should go to another server.
MAX_WAITING_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """A server that serves requests. needs_key: clients must send an API key. is_reranker: the model rates texts."""

    address: str
    info: ModelInfo
    needs_key: bool
    has_chat_template: bool
    is_reranker: bool = False


OnReady = Callable[[ReadyServer], None]


def run_server(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    sampling: Mapping[str, Any] | None = None,
    on_ready: OnReady | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM, then return. SIGHUP reads the file of API keys again.

    While the model loads, clients are asked to come again. The first signal lets requests in flight go on for
    settings.shutdown_timeout seconds, after which they get an error; a second one ends them at once.
    sampling: fields of SamplingParams for requests that do not set them, instead of the model's defaults.
    on_ready is called once requests are served.
    Raises ConfigError for invalid settings, for settings that would let anybody in, and if it cannot listen on the
    address. Also raises what AsyncEngine.start raises.
    """
    keys = ApiKeys(settings)
    check_exposure(settings, keys)
    check_prefill(config, settings)
    allow_open_files(settings)
    tools = None
    if settings.has_mcp:
        # Not imported without: its library takes time.
        from pagewick.server.mcp.config import mcp_servers
        from pagewick.server.mcp.toolbox import Toolbox

        tools = Toolbox(mcp_servers(settings), settings)
    chat_template = None if settings.chat_template is None else read_template(Path(settings.chat_template))
    with contextlib.ExitStack() as resources:
        tracing = None
        if settings.otlp_endpoint is not None and settings.api_server_count == 1:
            tracing = Tracing(settings)
            resources.callback(tracing.close)  # sends the last traces, however the server ends
        listener = resources.enter_context(listening(settings))
        # Here and not in the event loop, so that Ctrl-C ends a download.
        config = with_local_models(config)
        if config.max_waiting_requests is None:
            config = replace(config, max_waiting_requests=MAX_WAITING_REQUESTS)

        def announce(info: ModelInfo, has_chat_template: bool) -> None:
            if on_ready is not None:
                is_reranker = config.rerank or info.num_labels > 0
                on_ready(ReadyServer(address_of(listener), info, bool(keys), has_chat_template, is_reranker))

        if settings.api_server_count == 1:
            server = _Server(config, settings, sampling or {}, listener, announce, keys, chat_template, tracing, tools)
            running = server.run()
        else:
            from pagewick.server.hub.run import Hub

            running = Hub(config, settings, sampling or {}, listener, announce, keys, chat_template).run()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(running)


@dataclass
class _Server:
    """One run of the server. It starts HTTP, then the engine; it stops the engine, then HTTP."""

    config: EngineConfig
    settings: ServerSettings
    sampling: Mapping[str, Any]
    listener: socket.socket
    on_ready: Callable[[ModelInfo, bool], None]
    keys: ApiKeys
    chat_template: str | None
    tracing: Tracing | None
    tools: Toolbox | None = None

    def __post_init__(self) -> None:
        self._stage = Stage(ErrorBoundary(with_access_control(loading, self.settings, self.keys)))
        self._lifecycle = Lifecycle()

    async def run(self) -> None:
        stop, hurry = stop_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.keys.try_reload)
        http = HttpServer(self._stage, self.settings)
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
        try:
            if self.tools is not None and await first_done(self.tools.start(), stop.wait()):
                return
            starting = AsyncEngine.start(
                self.config,
                chat_template=self.chat_template,
                hang_timeout_s=self.settings.hang_timeout,
                tool_call_parser=self.settings.tool_call_parser,
            )
            engine = await first_done(starting, stop.wait())
            if isinstance(engine, AsyncEngine):
                set_up(engine, self.settings, self.sampling)
                await self._serve(engine, serving, stop, hurry)
        finally:
            if self.tools is not None:
                await self.tools.close()
            http.leave()
            await serving

    async def _serve(
        self, engine: AsyncEngine, serving: asyncio.Task[None], stop: asyncio.Event, hurry: asyncio.Event
    ) -> None:
        if self.tools is not None and PartKind.TOOL_CALL not in engine.part_kinds:
            await engine.close()
            raise ConfigError(
                "tools of MCP servers cannot be used: how this model writes tool calls is not known; leave out "
                "--mcp-command and --mcp-config, or name the form with --tool-call-parser"
            )
        reporting = asyncio.create_task(report_throughput(lambda: engine.stats, engine.info))
        try:
            self._stage.app = build_app(
                engine,
                self.settings,
                self._lifecycle,
                keys=self.keys,
                tracing=self.tracing,
                max_waiting_requests=self.config.max_waiting_requests,
                tools=self.tools,
            )
            warn_at_start(self.settings, engine)
            self.on_ready(engine.info, engine.has_chat_template)
            await first_done(asyncio.shield(serving), stop.wait())
            self._lifecycle.drain()
            drained = self._lifecycle.until_idle()
            await first_done(
                asyncio.shield(serving), hurry.wait(), drained, asyncio.sleep(self.settings.shutdown_timeout)
            )
        finally:
            reporting.cancel()
            await engine.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lifecycle.until_idle(), LAST_RESPONSES_S)


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the chat template {file}: {reason}; check the path") from None
