"""An API process: `python -m pagewick.server.hub.api_process CONNECTION LISTENER COUNTS INDEX HUB_PID`.

The first three are numbers of open files that it inherits. A Member of the hub starts it, and it ends with the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import uvloop
from prometheus_client import CollectorRegistry

from pagewick import log
from pagewick.api_arguments import load_text
from pagewick.async_llm import AsyncEngine
from pagewick.engine.messages import Failed, Outputs
from pagewick.errors import PagewickError
from pagewick.parallel.launch import die_with_parent
from pagewick.server.app import Common, ErrorBoundary, build_app, with_access_control
from pagewick.server.core.start_warnings import warn_at_start
from pagewick.server.engine_setup import set_up
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.http_server import HttpServer
from pagewick.server.hub.client import HubClient
from pagewick.server.hub.connection import Connection
from pagewick.server.hub.counts import CONNECTIONS, TEXT_JOBS, SharedCounts
from pagewick.server.hub.kept_responses import HubResponses
from pagewick.server.hub.messages import (
    Answer,
    Close,
    Drain,
    FromHub,
    Idle,
    Keys,
    Loaded,
    Losses,
    Report,
    Serve,
    Serving,
    Setup,
    State,
    WantReport,
    decode_from_hub,
    raw,
)
from pagewick.server.hub.questions import HubConversations, Questions
from pagewick.server.lifecycle import LAST_RESPONSES_S, Lifecycle, Stage, first_done, loading
from pagewick.server.telemetry.metric_sums import families_of
from pagewick.server.telemetry.metrics import Metrics, process_registry
from pagewick.server.telemetry.tracing import Tracing

# Distance between the seeds of two API processes' generators: more than anybody sets as --seed.
_SEED_STRIDE = 1 << 64

# Named explicitly, since __name__ is "__main__" in this process.
_logger = log.get_logger("pagewick.server.hub.api_process")


class ApiProcess:
    """One run of an API process. It serves from the message Serve to the message Close."""

    def __init__(
        self,
        connection: Connection[FromHub],
        listener: socket.socket,
        counts: SharedCounts,
        index: int,
        setup: Setup,
    ) -> None:
        self._connection = connection
        self._listener = listener
        self._setup = setup
        self._settings = settings = setup.settings
        self._keys = ApiKeys(settings, environ={})
        self._keys.take(setup.keys)
        self._stage = Stage(ErrorBoundary(with_access_control(loading, settings, self._keys)))
        self._lifecycle = Lifecycle()
        self._http = HttpServer(self._stage, settings, connections=counts.tally(CONNECTIONS, index))
        self._text_jobs = counts.tally(TEXT_JOBS, index)
        self._questions = Questions(connection.send)
        self._connected: asyncio.Future[HubClient] = asyncio.get_running_loop().create_future()
        self._client: HubClient | None = None
        self._registry: CollectorRegistry = process_registry()
        self._closing = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the hub ends it. Report to the hub if something cannot be loaded."""
        receiving = asyncio.create_task(self._receive())
        tracing = None
        try:
            if self._setup.answers_early:
                self._listen()
            tracing = None if self._settings.otlp_endpoint is None else Tracing(self._settings)
            engine = await first_done(self._start(tracing), self._closing.wait())
            await self._closing.wait()
            if isinstance(engine, AsyncEngine):
                await engine.close()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._lifecycle.until_idle(), LAST_RESPONSES_S)
        except PagewickError as error:
            self._connection.send(Failed(type(error).__name__, str(error)))
        finally:
            self._http.leave()
            if self._serving is not None:
                await self._serving
            if tracing is not None:
                tracing.close()
            receiving.cancel()
            self._connection.close()

    def _listen(self) -> None:
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))

    async def _start(self, tracing: Tracing | None) -> AsyncEngine:
        setup, settings = self._setup, self._settings
        text = await asyncio.to_thread(load_text, setup.config, setup.chat_template)
        self._connection.send(Loaded(has_chat_template=text[1] is not None))
        client = await self._connected
        seed = None if setup.config.seed is None else setup.config.seed + _SEED_STRIDE * setup.number
        parser = settings.tool_call_parser
        engine = AsyncEngine.over(client, setup.config, text, seed=seed, tool_call_parser=parser)
        set_up(engine, settings, setup.sampling)
        if setup.number == 0:
            warn_at_start(settings, engine)
        self._stage.app = build_app(
            engine,
            settings,
            self._lifecycle,
            keys=self._keys,
            tracing=tracing,
            max_waiting_requests=setup.config.max_waiting_requests,
            common=Common(
                metrics=Metrics(settings.model_name, client.info, registry=self._registry),
                render_metrics=self._questions.all_metrics,
                conversations=HubConversations(self._questions),
                responses=HubResponses(self._questions),
                text_jobs=self._text_jobs,
            ),
        )
        if self._serving is None:
            self._listen()
        self._connection.send(Serving())
        return engine

    async def _receive(self) -> None:
        while messages := await self._connection.receive():
            outputs = [message for message in messages if isinstance(message, Outputs)]
            if outputs and self._client is not None:
                self._client.give(outputs)
            if len(outputs) < len(messages):
                for message in messages:
                    self.handle(message)
        # The hub is gone, and the engine with it.
        self._closing.set()

    def handle(self, message: FromHub) -> None:
        match message:
            case Serve():
                self._client = HubClient(self._connection.send, self._setup.number, message)
                self._connected.set_result(self._client)
            case State() if self._client is not None:
                self._client.enter(message)
            case Losses() if self._client is not None:
                self._client.lose(message)
            case Answer():
                self._questions.take(message)
            case WantReport():
                self._connection.send(Report(raw(families_of(self._registry))))
            case Keys():
                self._keys.take(message.keys)
            case Drain():
                self._lifecycle.drain()
                self._draining = asyncio.create_task(self._tell_when_idle())
            case Close():
                self._closing.set()

    async def _tell_when_idle(self) -> None:
        await self._lifecycle.until_idle()
        self._connection.send(Idle())


async def run(connection_fd: int, listener_fd: int, counts_fd: int, index: int) -> None:
    with socket.socket(fileno=listener_fd) as listener:
        streams = await asyncio.open_connection(sock=socket.socket(fileno=connection_fd))
        connection = Connection(*streams, decode_from_hub)
        messages = await connection.receive()
        if not messages:
            return  # the hub is gone
        setup, *rest = messages
        assert isinstance(setup, Setup), "it is the first message"
        process = ApiProcess(connection, listener, SharedCounts(counts_fd), index, setup)
        for message in rest:
            process.handle(message)
        await process.run()


def main(connection_fd: int, listener_fd: int, counts_fd: int, index: int, hub_pid: int) -> int:
    die_with_parent(hub_pid)
    # The hub decides when to stop. A service manager signals all processes at once.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log.set_up(api_process=index)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(connection_fd, listener_fd, counts_fd, index))
    # The hub starts another one; this one must say why.
    except Exception as error:
        _logger.error("the API process failed", exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
