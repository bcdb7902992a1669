"""The process of a server with several models."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.server.app import ErrorBoundary, with_access_control
from pagewick.server.core.conversations import LocalConversations
from pagewick.server.core.stored_responses import LocalResponses
from pagewick.server.guard.access import check_exposure
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.guard.open_files import allow_open_files
from pagewick.server.http_server import HttpServer
from pagewick.server.lifecycle import LAST_RESPONSES_S, Lifecycle, Stage, first_done, loading, stop_signals
from pagewick.server.listening import address_of, listening
from pagewick.server.remote_prefill import check_prefill
from pagewick.server.router.app import build_router
from pagewick.server.router.entry import ModelEntry
from pagewick.server.router.loading import ServedModel, Together
from pagewick.server.router.models import RoutedModels
from pagewick.server.router.pool import LoadFailedError, ModelPool
from pagewick.server.run import MAX_WAITING_REQUESTS, read_template
from pagewick.server.settings import ServerSettings
from pagewick.server.tally import Tally
from pagewick.server.telemetry.tracing import Tracing

FindEntries = Callable[[], Sequence[ModelEntry]]


@dataclass(frozen=True, slots=True)
class ReadyRouter:
    """A server of several models that serves requests. names: those of the models that can be loaded now."""

    address: str
    names: Sequence[str]
    needs_key: bool


def run_router(
    find_entries: FindEntries, settings: ServerSettings, *, on_ready: Callable[[ReadyRouter], None] | None = None
) -> None:
    """Serve several models until SIGINT or SIGTERM, then return, as `run_server` does with one.

    find_entries: returns the models that can be loaded; it is called again when a request names another one, and may
    raise ConfigError. on_ready is called once requests are served, when the models that load at the start are loaded.
    Raises what run_server raises.
    """
    entries = checked(find_entries(), settings)
    keys = ApiKeys(settings)
    check_exposure(settings, keys)
    allow_open_files(settings)
    with contextlib.ExitStack() as resources:
        tracing = None
        if settings.otlp_endpoint is not None:
            tracing = Tracing(settings)
            resources.callback(tracing.close)
        listener = resources.enter_context(listening(settings))

        def announce(names: Sequence[str]) -> None:
            if on_ready is not None:
                on_ready(ReadyRouter(address_of(listener), names, bool(keys)))

        router = _Router(find_entries, entries, settings, listener, announce, keys, tracing)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(router.run())


def checked(entries: Sequence[ModelEntry], settings: ServerSettings) -> Sequence[ModelEntry]:
    """Return the models to start with.

    Raises ConfigError if two have one name, not all can be loaded at once, pinned ones leave no place for others, or a
    chat template cannot be read.
    """
    owners: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in entry.names:
            if owners.setdefault(name, entry) is not entry:
                raise ConfigError(f"two models are called {name!r}; give one of them another name")
    for entry in entries:
        check_prefill(entry.config, entry.settings)
        if entry.settings.chat_template is not None:
            read_template(Path(entry.settings.chat_template))
    at_start = [entry.name for entry in entries if entry.loads_at_start]
    if len(at_start) > settings.models_max:
        raise ConfigError(
            f"{len(at_start)} models are to be loaded at the start, and --models-max is {settings.models_max}; raise "
            "it, or leave load-on-startup out of some of them"
        )
    pinned = [entry.name for entry in entries if entry.is_pinned]
    if len(pinned) >= settings.models_max and len(entries) > len(pinned):
        raise ConfigError(
            f"--models-max is {settings.models_max}, and pinned models ({', '.join(pinned)}) leave the others no "
            "place; raise it, or leave pinned out of some of them"
        )
    return entries


@dataclass
class _Router:
    """One run of the server. It starts HTTP, then the models; it stops the models, then HTTP."""

    find_entries: FindEntries
    entries: Sequence[ModelEntry]
    settings: ServerSettings
    listener: socket.socket
    on_ready: Callable[[Sequence[str]], None]
    keys: ApiKeys
    tracing: Tracing | None

    async def run(self) -> None:
        stop, hurry = stop_signals()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.keys.try_reload)
        stage = Stage(ErrorBoundary(with_access_control(loading, self.settings, self.keys)))
        http, lifecycle = HttpServer(stage, self.settings), Lifecycle()
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
        pool: ModelPool[ServedModel] = ModelPool(max_loaded=self.settings.models_max)
        try:
            models = await first_done(self._start(pool, stage, lifecycle), stop.wait())
            if isinstance(models, RoutedModels):
                self.on_ready([model.name for model in pool.models])
                await first_done(asyncio.shield(serving), stop.wait())
            lifecycle.drain()
            drained = lifecycle.until_idle()
            await first_done(
                asyncio.shield(serving), hurry.wait(), drained, asyncio.sleep(self.settings.shutdown_timeout)
            )
        finally:
            await pool.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lifecycle.until_idle(), LAST_RESPONSES_S)
            http.leave()
            await serving

    async def _start(self, pool: ModelPool[ServedModel], stage: Stage, lifecycle: Lifecycle) -> RoutedModels:
        """Load the models that are wanted from the start; serve requests then. Raises the error of one that fails."""
        ttl_s = max((entry.config.session_ttl for entry in self.entries), default=EngineConfig().session_ttl)
        together = Together(
            conversations=LocalConversations(ttl_s),
            responses=LocalResponses(),
            text_jobs=Tally(),
            tracing=self.tracing,
        )
        models = RoutedModels(pool, together, self._limited_entries, max_loaded=self.settings.models_max)
        await models.refresh()
        for model in models.at_start:
            try:
                await pool.acquire(model)
            except LoadFailedError as error:
                raise error.failure from None
            pool.release(model)
        stage.app = build_router(models, together, self.settings, lifecycle, self.keys)
        return models

    def _limited_entries(self) -> list[ModelEntry]:
        return [_limited(entry) for entry in self.find_entries()]


def _limited(entry: ModelEntry) -> ModelEntry:
    if entry.config.max_waiting_requests is not None:
        return entry
    return replace(entry, config=replace(entry.config, max_waiting_requests=MAX_WAITING_REQUESTS))
