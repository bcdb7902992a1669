"""Hub: the process of a server that has several API processes. It binds, starts and ends all others."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from pagewick.async_llm import start_engine
from pagewick.config import EngineConfig
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.supervisor import Supervisor
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.hub.counts import SharedCounts
from pagewick.server.hub.member import Inheritance, Member
from pagewick.server.hub.messages import Keys, Setup
from pagewick.server.hub.peer import Peer
from pagewick.server.hub.state import HubState
from pagewick.server.lifecycle import LAST_RESPONSES_S, first_done, stop_signals
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.engine_metrics import report_throughput
from pagewick.server.telemetry.tracing import CLOSE_TIMEOUT_S

# Seconds for the API processes to end once their last responses are on their way; then they are killed.
_CLOSE_GRACE_S = LAST_RESPONSES_S + CLOSE_TIMEOUT_S + 2.0

StartEngine = Callable[[EngineConfig, ServerSettings], Awaitable[Supervisor]]


class Hub:
    """One run of the server. The arguments are those of `run_server`, which has checked them.

    listener: the socket that is bound. start_engine: starts the engine and waits until it is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings,
        sampling: Mapping[str, Any],
        listener: socket.socket,
        on_ready: Callable[[ModelInfo, bool], None],
        keys: ApiKeys,
        chat_template: str | None,
        start_engine: StartEngine = lambda config, settings: start_engine(
            config, hang_timeout_s=settings.hang_timeout, tool_call_parser=settings.tool_call_parser
        ),
    ) -> None:
        self._config = config
        self._settings = settings
        self._sampling = dict(sampling)
        self._listener = listener
        self._on_ready = on_ready
        self._keys = keys
        self._chat_template = chat_template
        self._start_engine = start_engine
        self._numbers = itertools.count()
        self._members: list[Member] = []

    async def run(self) -> None:
        stop, hurry = stop_signals()
        self._state = HubState(self._config.session_ttl, self._settings.model_name)
        counts_file = SharedCounts.create_file(self._settings.api_server_count)
        counts, inheritance = SharedCounts(counts_file), Inheritance(self._listener, counts_file)
        self._members = [
            Member(index, inheritance, counts, self._state, self._setup, self._settings.hang_timeout)
            for index in range(self._settings.api_server_count)
        ]
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_keys)
        running = [asyncio.create_task(member.keep_running()) for member in self._members]
        try:
            await first_done(self._start(), stop.wait())
            if self._state.engine is not None and not stop.is_set():
                await self._serve(self._state.engine, stop, hurry)
        finally:
            await self._end(running)
            os.close(counts_file)

    async def _start(self) -> None:
        """Return once all API processes serve. Raises the error that stops one of them, or the engine."""
        starting = asyncio.create_task(self._start_with_engine())
        works = [starting, *(asyncio.ensure_future(member.started) for member in self._members)]
        try:
            await asyncio.gather(*works)
            for member in self._members:
                if member.peer is not None:
                    await first_done(member.peer.serving.wait(), member.peer.idle.wait())
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _start_with_engine(self) -> None:
        self._state.use(await self._start_engine(self._config, self._settings))

    async def _serve(self, engine: Supervisor, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Serve until a signal, and then until no request is in flight or their time is over."""
        self._on_ready(engine.info, any(peer.has_chat_template for peer in self._peers()))
        reporting = asyncio.create_task(report_throughput(lambda: engine.stats, engine.info))
        try:
            await stop.wait()
            drained = asyncio.gather(*(peer.idle.wait() for peer in self._peers()))
            for member in self._members:
                member.drain()
            await first_done(drained, hurry.wait(), asyncio.sleep(self._settings.shutdown_timeout))
        finally:
            reporting.cancel()

    async def _end(self, running: list[asyncio.Task[None]]) -> None:
        for member in self._members:
            member.close()
        ending: list[Awaitable[object]] = [asyncio.wait(running, timeout=_CLOSE_GRACE_S)]
        if self._state.engine is not None:
            ending.append(self._state.engine.close())
        await asyncio.gather(*ending)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _setup(self, is_first: bool) -> Setup:
        # The processes get the digests of the keys and not the keys.
        settings = replace(self._settings, api_key=(), api_key_file=None)
        return Setup(
            next(self._numbers), self._config, settings, self._sampling, self._chat_template, self._keys.known, is_first
        )

    def _reload_keys(self) -> None:
        self._keys.try_reload()
        for peer in self._peers():
            peer.send(Keys(self._keys.known))

    def _peers(self) -> list[Peer]:
        return [member.peer for member in self._members if member.peer is not None]
