"""ModelPool: which of a server's models are loaded, and which one has to make room for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from pagewick.errors import EngineDeadError, NotEnoughMemoryError
from pagewick.log import get_logger

State = Literal["unloaded", "loading", "loaded", "unloading"]

# Seconds for which a model that could not be loaded is not tried again: clients repeat failed requests within seconds.
RETRY_AFTER_S = 10.0

_logger = get_logger(__name__)


class Loaded(Protocol):
    """A loaded model."""

    async def close(self) -> None:
        """End it. Requests that are still running get an EngineDeadError."""
        ...


_Loaded = TypeVar("_Loaded", bound=Loaded)
_Result = TypeVar("_Result", covariant=True)


class Source(Protocol[_Result]):
    """Where a model comes from. Both methods may be cancelled, and called again later."""

    async def prepare(self) -> None:
        """Do what needs no place among the loaded models, such as a download."""
        ...

    async def load(self) -> _Result:
        """Return the loaded model. Raises NotEnoughMemoryError if it would fit once another one is unloaded."""
        ...


@dataclass(eq=False)
class PooledModel(Generic[_Loaded]):
    """A model of the pool. failure: why it could not be loaded the last time; None if it could.

    used_at: when its last request ended, by the pool's clock. waiting: requests that wait until it is loaded.
    """

    name: str
    source: Source[_Loaded]
    state: State = "unloaded"
    loaded: _Loaded | None = None
    failure: Exception | None = None
    failed_at: float = 0.0
    num_in_flight: int = 0
    used_at: float = 0.0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def takes_place(self) -> bool:
        return self.loaded is not None

    @property
    def is_wanted(self) -> bool:
        return any(not one.done() for one in self.waiting)


class ModelPool(Generic[_Loaded]):
    """Loads models when they are wanted, at most `max_loaded` at a time.

    Models are loaded one after the other, in the order in which they were first wanted. If there is no place, or not
    enough memory, the model without requests that was used longest ago is unloaded. If all have requests, one of them
    gets no new ones until those in flight have ended; then it is unloaded, so that no model waits for ever.
    idle_s: seconds without a request after which a model is unloaded; None is never.
    """

    def __init__(
        self, *, max_loaded: int, idle_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_loaded = max_loaded
        self._idle_s = idle_s
        self._clock = clock
        self._turn = asyncio.Lock()
        self._models: dict[str, PooledModel[_Loaded]] = {}
        self._is_closing = False

    @property
    def models(self) -> Sequence[PooledModel[_Loaded]]:
        return list(self._models.values())

    def add(self, name: str, source: Source[_Loaded]) -> PooledModel[_Loaded]:
        assert name not in self._models, "names are unique"
        self._models[name] = model = PooledModel(name, source)
        return model

    async def acquire(self, model: PooledModel[_Loaded]) -> _Loaded:
        """Return the model once it is loaded; it stays so until `release` is called.

        Raises what loading it raises, and EngineDeadError if the pool is closed meanwhile.
        """
        if self._is_closing:
            raise _closing()
        if model.state != "loaded":
            await self._wait(model)
        else:
            self._enter(model)
        assert model.loaded is not None, "a model with requests stays loaded"
        return model.loaded

    def release(self, model: PooledModel[_Loaded]) -> None:
        """End the use of a model that `acquire` has returned."""
        model.num_in_flight -= 1
        if model.num_in_flight:
            return
        model.idle.set()
        model.used_at = used_at = self._clock()
        if self._idle_s is not None:
            asyncio.get_running_loop().call_later(self._idle_s, self._unload_unused, model, used_at)

    async def unload(self, model: PooledModel[_Loaded], timeout_s: float) -> None:
        """Unload a model as soon as its requests have ended, after `timeout_s` seconds at the latest.

        Returns at once if it is not loaded.
        """
        if model.state == "loading" and model.task is not None:
            await asyncio.wait([model.task])
        if model.state in ("loaded", "unloading"):
            ending = self._start_unloading(model, "a client asked for it")
            await asyncio.wait([ending], timeout=timeout_s)
            model.idle.set()
            await asyncio.wait([ending])

    async def close(self) -> None:
        """Unload all models at once."""
        self._is_closing = True
        tasks = [model.task for model in self.models if model.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loaded = [model.loaded for model in self.models if model.loaded is not None]
        await asyncio.gather(*(one.close() for one in loaded))
        for model in self.models:
            model.state, model.loaded = "unloaded", None
            self._answer(model, _closing())

    def _enter(self, model: PooledModel[_Loaded]) -> None:
        model.num_in_flight += 1
        model.idle.clear()

    async def _wait(self, model: PooledModel[_Loaded]) -> None:
        """Wait until the model is loaded, and for this request's use of it."""
        if model.failure is not None and self._clock() - model.failed_at < RETRY_AFTER_S and model.state == "unloaded":
            raise model.failure
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(answer)
        if model.state == "unloaded":
            self._start_loading(model)
        try:
            await answer
        except asyncio.CancelledError:
            # It may have been granted in the same turn of the event loop.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.release(model)
            raise

    def _start_loading(self, model: PooledModel[_Loaded]) -> None:
        model.state = "loading"
        model.task = asyncio.create_task(self._load(model))

    async def _load(self, model: PooledModel[_Loaded]) -> None:
        began = self._clock()
        try:
            await model.source.prepare()
            async with self._turn:
                if not model.is_wanted:
                    model.state = "unloaded"
                    return
                while sum(one.takes_place for one in self.models) >= self._max_loaded:
                    await self._make_room(model)
                model.loaded = await self._load_with_room(model)
        # Any exception: the requests that wait for the model must get it, and other models go on.
        except Exception as error:
            model.state, model.failure, model.failed_at = "unloaded", error, self._clock()
            _logger.error("%s could not be loaded: %s", model.name, error)
            self._answer(model, error)
            return
        model.state, model.failure, model.used_at = "loaded", None, self._clock()
        _logger.info("%s is loaded after %.2f s", model.name, self._clock() - began)
        model.idle.set()
        self._answer(model, None)

    async def _load_with_room(self, model: PooledModel[_Loaded]) -> _Loaded:
        while True:
            try:
                return await model.source.load()
            except NotEnoughMemoryError as error:
                if not any(one.takes_place for one in self.models):
                    raise
                _logger.info("%s does not fit beside the other models: %s", model.name, str(error).partition("\n")[0])
                await self._make_room(model)

    async def _make_room(self, wanted: PooledModel[_Loaded]) -> None:
        """Unload the model that is needed least. One of them takes a place."""
        ending = [one.task for one in self.models if one.state == "unloading" and one.task is not None]
        if not ending:
            loaded = [one for one in self.models if one.state == "loaded"]
            least = min(loaded, key=lambda one: (one.num_in_flight > 0, one.used_at))
            ending = [self._start_unloading(least, f"{wanted.name} needs its place")]
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)

    def _start_unloading(self, model: PooledModel[_Loaded], reason: str) -> asyncio.Task[None]:
        if model.state == "loaded":
            model.state = "unloading"
            model.task = asyncio.create_task(self._unload(model, reason))
        assert model.task is not None, "a model that is being unloaded has its task"
        return model.task

    async def _unload(self, model: PooledModel[_Loaded], reason: str) -> None:
        assert model.loaded is not None
        await model.idle.wait()
        try:
            await model.loaded.close()
        finally:
            model.loaded, model.state, model.task = None, "unloaded", None
            _logger.info("%s is unloaded: %s", model.name, reason)
            # Requests that have come meanwhile want it back, after those that wait for its place.
            if model.is_wanted and not self._is_closing:
                self._start_loading(model)

    def _unload_unused(self, model: PooledModel[_Loaded], used_at: float) -> None:
        is_unused = model.num_in_flight == 0 and model.used_at == used_at
        if is_unused and model.state == "loaded" and not self._is_closing:
            self._start_unloading(model, f"no request for {self._idle_s:g} seconds")

    def _answer(self, model: PooledModel[_Loaded], error: Exception | None) -> None:
        """Let the requests go on that wait for the model, or give them the error."""
        waiting, model.waiting = model.waiting, []
        for one in waiting:
            if one.done():
                continue
            if error is not None:
                one.set_exception(error)
            else:
                self._enter(model)
                one.set_result(None)


def _closing() -> EngineDeadError:
    return EngineDeadError("the server is shutting down; send the request again, to another server")
