"""How a model of several is loaded: its engine process, and the application that answers its requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from pagewick.async_llm import AsyncEngine
from pagewick.config import EngineConfig
from pagewick.devices import available_memory
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import NotEnoughMemoryError
from pagewick.local_models import checked_local_models, weight_bytes
from pagewick.log import of_model
from pagewick.server.app import Stores, api_routes, routed
from pagewick.server.core.start_warnings import warn_at_start
from pagewick.server.engine_setup import set_up
from pagewick.server.router.entry import ModelEntry
from pagewick.server.telemetry.engine_metrics import report_throughput
from pagewick.server.telemetry.http_metrics import HttpMetrics
from pagewick.server.telemetry.metric_sums import Family, families_of, summed, totals
from pagewick.server.telemetry.metrics import HTTP_DURATION, HTTP_REQUESTS, Metrics
from pagewick.server.telemetry.request_log import RequestLog
from pagewick.server.telemetry.tracing import Tracing

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Together(Stores):
    """The state that all models of a server share. Conversations and responses outlive the model that made them."""

    tracing: Tracing | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model. app: answers requests that have passed the server's checks."""

    engine: AsyncEngine
    app: ASGIApp
    metrics: Metrics
    reporting: asyncio.Task[None]
    on_close: Callable[[ServedModel], None]

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def promised_bytes(self) -> int:
        """The main memory that its KV cache may still take: on a CPU, blocks take memory when they are first used."""
        info = self.info
        if info.device != "cpu" or not info.num_kv_blocks:
            return 0
        num_open = min(self.engine.stats.num_blocks, info.num_kv_blocks)
        return info.kv_cache_bytes * (info.num_kv_blocks - num_open) // info.num_kv_blocks

    async def close(self) -> None:
        self.reporting.cancel()
        try:
            await self.engine.close("the model is unloaded; send the request again")
        finally:
            self.on_close(self)


class ModelSource:
    """Loads one model, again and again if need be.

    num_places: the largest number of models that can be loaded. others: returns those that are loaded.
    """

    def __init__(
        self,
        entry: ModelEntry,
        together: Together,
        *,
        num_places: int,
        others: Callable[[], Sequence[ServedModel]],
    ) -> None:
        self.entry = entry
        self._together = together
        self._num_places = num_places
        self._others = others
        self._local: EngineConfig | None = None
        self._past: list[Family] = []
        self._metrics: Metrics | None = None  # those of the model while it is loaded

    async def prepare(self) -> None:
        """Download the model, if it is not on this disk, and check its files before it takes the place of another."""
        self._local = await _in_daemon_thread(lambda: checked_local_models(self.entry.config))

    async def load(self) -> ServedModel:
        assert self._local is not None, "prepare comes first"
        settings, local = self.entry.settings, self._local
        with of_model(self.entry.name):
            engine = await AsyncEngine.start(
                local,
                chat_template=None if settings.chat_template is None else Path(settings.chat_template),
                hang_timeout_s=settings.hang_timeout,
                tool_call_parser=settings.tool_call_parser,
                at_each_start=self._beside_others,
            )
            try:
                set_up(engine, settings, self.entry.sampling)
                warn_at_start(settings, engine)
                return self._served(engine, local)
            except BaseException:
                await engine.close()
                raise

    async def _beside_others(self, config: EngineConfig) -> EngineConfig:
        """Return the config for a start of the engine, the first one or another after its death."""
        others = [model for model in self._others() if model.metrics is not self._metrics]
        promised, num_left = sum(model.promised_bytes for model in others), self._num_places - len(others)
        return await _in_daemon_thread(lambda: _beside(config, promised, max(1, num_left)))

    def families(self, served: ServedModel | None) -> Iterable[Family]:
        """Return the model's metrics, with the counts of when it was loaded before."""
        now = [] if served is None else families_of(served.metrics.registry)
        return summed([self._past, [one for one in now if one.name not in (HTTP_REQUESTS, HTTP_DURATION)]])

    def _served(self, engine: AsyncEngine, config: EngineConfig) -> ServedModel:
        settings, together = self.entry.settings, self._together
        name = self.entry.name
        metrics = Metrics(
            name, engine.info, lambda: engine.stats, health=lambda: engine.health, registry=CollectorRegistry()
        )
        self._metrics = metrics
        log = RequestLog(settings, metrics, together.tracing)
        app = HttpMetrics(
            routed(api_routes(engine, settings, together, log, config.max_waiting_requests)), metrics, log
        )
        reporting = asyncio.create_task(report_throughput(lambda: engine.stats, engine.info))
        return ServedModel(engine, app, metrics, reporting, self._keep_counts)

    def _keep_counts(self, served: ServedModel) -> None:
        self._past = totals(self.families(served))
        self._metrics = None


def _beside(config: EngineConfig, promised: int, num_left: int) -> EngineConfig:
    """Return a config whose KV cache leaves memory for the other models, those loaded and those to come.

    promised: bytes that the KV caches of loaded models may still take. Raises NotEnoughMemoryError if the weights do
    not fit beside these.
    """
    weights, free = weight_bytes(config), available_memory("cpu") - promised
    if promised and weights > free:
        raise NotEnoughMemoryError(
            f"not enough memory: the weights take {weights / 2**30:.1f} GiB, and the loaded models leave "
            f"{max(0, free) / 2**30:.1f} GiB"
        )
    later = max(0, free - weights) * (num_left - 1) // num_left
    return replace(config, memory_reserve=config.memory_reserve + promised + later)


async def _in_daemon_thread(work: Callable[[], _Result]) -> _Result:
    """Return the result of blocking work. Unlike an executor's thread, it does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="model", daemon=True).start()
    return await future
