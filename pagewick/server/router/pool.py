"""ModelPool: which of a server's models are loaded, and which one has to make room for another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from pagewick.errors import EngineDeadError, NotEnoughMemoryError
from pagewick.log import get_logger, one_line

State = Literal["unloaded", "loading", "loaded", "unloading"]

# Seconds for which a model that could not be loaded is not tried again: clients repeat failed requests within seconds.
RETRY_AFTER_S = 10.0
# Seconds for which a model waits for a place that gets free by itself, before another one takes no new requests for it.
PATIENCE_S = 5.0

_logger = get_logger(__name__)


class LoadFailedError(Exception):
    """A model could not be loaded. failure: the reason."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


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
    """A model of the pool.

    failure: why it could not be loaded the last time; None if it could. is_too_large: it did not fit without others.
    used_at: when its last request ended, by the pool's clock. waiting: requests that wait until it is loaded. task:
    loads or unloads it. is_ending: it is being ended, and not only drained. makes_room: it is unloaded because another
    model needs its place. resting: the timer that unloads it if it is not used. idle_s: seconds without a request after
    which it is unloaded; None is never. is_pinned: it makes no room for others.
    """

    name: str
    source: Source[_Loaded]
    idle_s: float | None = None
    is_pinned: bool = False
    state: State = "unloaded"
    loaded: _Loaded | None = None
    failure: Exception | None = None
    failed_at: float = 0.0
    is_too_large: bool = False
    num_in_flight: int = 0
    used_at: float = 0.0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    is_ending: bool = False
    makes_room: bool = False
    resting: asyncio.TimerHandle | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_wanted(self) -> bool:
        return any(not one.done() for one in self.waiting)


class ModelPool(Generic[_Loaded]):
    """Loads models when they are wanted, at most `max_loaded` at a time.

    Models are loaded one after the other, in the order in which they were first wanted. If there is no place, or not
    enough memory, the model without requests that was used longest ago is unloaded. If all have requests for
    `patience_s` seconds, one of them gets no new ones until those in flight have ended; then it is unloaded, so that no
    model waits for ever.
    """

    def __init__(
        self,
        *,
        max_loaded: int,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_loaded = max_loaded
        self._patience_s = patience_s
        self._clock = clock
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()  # a model has no more requests, or has left its place, or nobody wants it any more
        self._models: dict[str, PooledModel[_Loaded]] = {}
        self._is_closing = False

    @property
    def models(self) -> Sequence[PooledModel[_Loaded]]:
        return list(self._models.values())

    def add(
        self, name: str, source: Source[_Loaded], *, idle_s: float | None = None, is_pinned: bool = False
    ) -> PooledModel[_Loaded]:
        """Add a model that is not loaded. idle_s, is_pinned: as in PooledModel."""
        assert name not in self._models, "names are unique"
        self._models[name] = model = PooledModel(name, source, idle_s, is_pinned)
        return model

    def remove(self, model: PooledModel[_Loaded]) -> None:
        """Forget a model that is not loaded."""
        assert model.state == "unloaded", "only these can be removed"
        del self._models[model.name]

    async def acquire(self, model: PooledModel[_Loaded]) -> _Loaded:
        """Return the model once it is loaded; it stays so until `release` is called.

        Raises LoadFailedError, and EngineDeadError if the pool is closed meanwhile.
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
        if not model.num_in_flight:
            model.used_at = self._clock()
            self._rest(model)

    async def unload(self, model: PooledModel[_Loaded], timeout_s: float | None = None) -> None:
        """Unload a model as soon as its requests have ended, after `timeout_s` seconds at the latest, if that is given.

        If it is being loaded, that is given up. Returns at once if it is not loaded.
        """
        if model.state == "loading" and model.task is not None:
            model.task.cancel()
            await asyncio.wait([model.task])
            if model.state == "loading":
                model.state, model.task = "unloaded", None
                message = "the model was unloaded before it was loaded; send the request again"
                self._answer(model, LoadFailedError(EngineDeadError(message)))
        if model.state in ("loaded", "unloading"):
            model.makes_room = False
            ending = self._start_unloading(model, "a client asked for it")
            await asyncio.wait([ending], timeout=timeout_s)
            model.idle.set()
            await asyncio.wait([ending])

    async def close(self) -> None:
        """Unload all models at once."""
        self._is_closing = True
        ending = [model.task for model in self.models if model.task is not None and model.is_ending]
        tasks = [model.task for model in self.models if model.task is not None and not model.is_ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *ending, return_exceptions=True)
        loaded = [model.loaded for model in self.models if model.loaded is not None]
        await asyncio.gather(*(one.close() for one in loaded), return_exceptions=True)
        for model in self.models:
            model.state, model.loaded = "unloaded", None
            self._stay(model)
            self._answer(model, _closing())

    def _enter(self, model: PooledModel[_Loaded]) -> None:
        model.num_in_flight += 1
        model.idle.clear()
        self._stay(model)

    def _rest(self, model: PooledModel[_Loaded]) -> None:
        """Note that a model has no requests."""
        model.idle.set()
        self._news.set()
        self._stay(model)
        if model.idle_s is not None:
            model.resting = asyncio.get_running_loop().call_later(model.idle_s, self._unload_unused, model)

    def _stay(self, model: PooledModel[_Loaded]) -> None:
        if model.resting is not None:
            model.resting.cancel()
            model.resting = None

    async def _wait(self, model: PooledModel[_Loaded]) -> None:
        """Wait until the model is loaded, and for this request's use of it."""
        if model.failure is not None and self._clock() - model.failed_at < RETRY_AFTER_S and model.state == "unloaded":
            raise LoadFailedError(model.failure)
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
            self._news.set()
            raise

    def _start_loading(self, model: PooledModel[_Loaded]) -> None:
        model.state = "loading"
        model.task = asyncio.create_task(self._load(model))

    async def _load(self, model: PooledModel[_Loaded]) -> None:
        began = self._clock()
        try:
            await model.source.prepare()
            async with self._turn:
                try:
                    model.loaded = await self._load_into_place(model)
                finally:
                    self._let_all_go_on()
        # Any exception: the requests that wait for the model must get it, and other models go on.
        except Exception as error:
            _logger.error("%s could not be loaded: %s", model.name, one_line(error))
            self._fail(model, error)
            return
        if model.loaded is None:
            model.state, model.task = "unloaded", None
            return
        model.state, model.failure, model.is_too_large, model.task = "loaded", None, False, None
        model.used_at = self._clock()
        _logger.info("%s is loaded after %.2f s", model.name, self._clock() - began)
        self._rest(model)
        self._answer(model, None)

    def _fail(self, model: PooledModel[_Loaded], error: Exception) -> None:
        model.state, model.failure, model.failed_at, model.task = "unloaded", error, self._clock(), None
        self._answer(model, LoadFailedError(error))

    async def _load_into_place(self, model: PooledModel[_Loaded]) -> _Loaded | None:
        """Return the loaded model; None if nobody wants it any more."""
        patient_until = self._clock() + self._patience_s
        is_large = False
        while model.is_wanted:
            others = [one for one in self.models if one.loaded is not None]
            if len(others) < self._max_loaded and not (is_large and others):
                try:
                    return await model.source.load()
                except NotEnoughMemoryError as error:
                    model.is_too_large = model.is_too_large or not others
                    if model.is_too_large:
                        raise
                    is_large = True
                    first_line = str(error).partition("\n")[0]
                    _logger.info("%s does not fit beside the other models: %s", model.name, first_line)
            elif await self._make_room(model, patient_until):
                is_large = False  # one that has been unloaded may be enough
        return None

    async def _make_room(self, wanted: PooledModel[_Loaded], patient_until: float) -> bool:
        """Unload a model without requests, or wait for one. Return whether one has been unloaded.

        Raises NotEnoughMemoryError if all that are loaded are pinned.
        """
        reason, places = f"{wanted.name} needs its place", [one for one in self.models if one.loaded is not None]
        if all(one.is_pinned and one.state == "loaded" for one in places):
            names = ", ".join(one.name for one in places)
            raise NotEnoughMemoryError(f"pinned models leave no place for it: unload {names} (POST /models/unload)")
        loaded = [one for one in places if one.state == "loaded" and not one.is_pinned]
        loaded.sort(key=lambda one: one.used_at)
        unused = next((one for one in loaded if not one.num_in_flight), None)
        ending = next((one for one in self.models if one.is_ending and one.task is not None), None)
        if ending is not None and ending.task is not None:
            await asyncio.wait([ending.task])
        elif unused is not None:
            await asyncio.wait([self._start_unloading(unused, reason)])
        else:
            seconds = patient_until - self._clock()
            if seconds <= 0 and loaded and not any(one.state == "unloading" for one in self.models):
                loaded[0].makes_room = True
                self._start_unloading(loaded[0], reason)
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds if seconds > 0 else None):
                    await self._news.wait()
        return sum(one.loaded is not None for one in self.models) < len(places)

    def _let_all_go_on(self) -> None:
        """Let models take requests again whose place is not needed any more."""
        for model in self.models:
            if model.state == "unloading" and model.makes_room and not model.is_ending and model.task is not None:
                model.task.cancel()
                model.state, model.task, model.makes_room = "loaded", None, False
                self._answer(model, None)

    def _start_unloading(self, model: PooledModel[_Loaded], reason: str) -> asyncio.Task[None]:
        if model.state == "loaded":
            model.state = "unloading"
            model.task = asyncio.create_task(self._unload(model, reason))
        assert model.task is not None, "a model that is being unloaded has its task"
        return model.task

    async def _unload(self, model: PooledModel[_Loaded], reason: str) -> None:
        assert model.loaded is not None
        self._stay(model)
        await model.idle.wait()
        model.is_ending = True
        try:
            await model.loaded.close()
        finally:
            model.loaded, model.state, model.task = None, "unloaded", None
            model.is_ending = model.makes_room = False
            self._news.set()
            _logger.info("%s is unloaded: %s", model.name, reason)
            # Requests that have come meanwhile want it back, after those that wait for its place.
            if model.is_wanted and not self._is_closing:
                self._start_loading(model)

    def _unload_unused(self, model: PooledModel[_Loaded]) -> None:
        if model.state == "loaded" and not model.num_in_flight and not self._is_closing:
            self._start_unloading(model, f"no request for {model.idle_s:g} seconds")

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
