"""Generation: one running request with all its choices. Imports no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from msgspec import structs

from pagewick.delta_queue import DeltaQueue, Growing, joined
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import DeadlineExceededError
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.request_stream import RequestStream, failure_of

OnDelta = Callable[[ChoiceDelta], None]


class Client(Protocol):
    """The interface to an engine; EngineClient implements it. is_alive: health is "ready", so requests are accepted."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def health(self) -> EngineHealth: ...
    def open(
        self, request: EngineRequest, take: Callable[[list[RequestDelta] | Exception], None]
    ) -> Callable[[], None]: ...
    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None: ...
    async def change_adapter(self, name: str, path: str = "", *, replaces: bool = False) -> None: ...
    async def close(self) -> None: ...


class Reader(Protocol):
    """Takes the deltas of a Generation."""

    def take(self, delta: ChoiceDelta) -> bool:
        """Return whether there is room for more; if not, further deltas should wait."""
        ...

    async def until_ready(self) -> None:
        """Wait until there is room again."""
        ...


@dataclass(frozen=True, slots=True)
class Listener:
    """A Reader that always has room. hear: gets every delta."""

    hear: OnDelta

    def take(self, delta: ChoiceDelta) -> bool:
        self.hear(delta)
        return True

    async def until_ready(self) -> None:
        pass


class Generation:
    """A running request: an async iterator of ChoiceDeltas, with the deltas of its choices interleaved.

        async with engine.request(token_ids, params) as generation:
            async for delta in generation:
                ...

    Entering starts the request; leaving aborts unfinished choices. `stream.output` is the output so far. The engine
    does not wait for a slow reader; at most MAX_WAITING_DELTAS deltas, and one per choice, wait for it, or more if they
    have log-probabilities. Deltas of a choice that come from the engine at the same time are one delta.
    running: lists this Generation by its request id while it is entered. on_delta: called with every delta at once, and
    with a last one for each choice that stays unfinished. stream_interval: number of tokens that a delta waits for,
    unless it is the first or the last of its choice.
    """

    def __init__(
        self,
        client: Client,
        request: EngineRequest,
        stream: RequestStream,
        running: dict[str, Generation],
        on_delta: OnDelta | None,
        stream_interval: int = 1,
    ) -> None:
        self.stream = stream
        self._client = client
        self._request = request
        self._running = running
        self._on_delta = on_delta
        self._growing = None if stream_interval == 1 else Growing(stream_interval)
        self._leave: Callable[[], None] = lambda: None
        self._waiting = DeltaQueue()
        self._reader: Reader | None = None  # gets deltas directly
        self._has_failed = False

    @property
    def adapter(self) -> str:
        """The name of the request's LoRA adapter; empty: none."""
        return self._request.adapter

    @property
    def params(self) -> SamplingParams:
        return self._request.params

    @property
    def output(self) -> RequestOutput:
        return self.stream.output

    def begin_late(self, waited_s: float) -> None:
        """Count the seconds that the request has waited, before it is entered, towards its timeout.

        Raises DeadlineExceededError if nothing of the timeout is left.
        """
        options = self._request.options
        if options.timeout_s is None:
            return
        if options.timeout_s <= waited_s:
            raise DeadlineExceededError(f"the request was not finished within its timeout of {options.timeout_s:g} s")
        left = structs.replace(options, timeout_s=options.timeout_s - waited_s)
        self._request = structs.replace(self._request, options=left)

    async def whole(self) -> RequestOutput:
        """Run the request to its end, and return its output. Raises what iterating would raise."""
        async with self:
            async for _ in self:
                pass
        return self.output

    def fail(self, error: Exception) -> None:
        """Make the iterator raise an error, after all deltas that came before it."""
        self._reader = None
        for delta in self._growing.rest() if self._growing is not None else ():
            self._waiting.put(delta)
        self._waiting.put(error)

    async def __aenter__(self) -> Self:
        # An id that is in use stays with the request that has it; `open` refuses this one.
        self._running.setdefault(self.output.request_id, self)
        try:
            self._leave = self._client.open(self._request, self._take)
        # The iterator raises every error.
        except Exception as error:
            self.fail(error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._running.get(self.output.request_id) is self:
            del self._running[self.output.request_id]
        # A client that disconnects cancels the task or closes the iterator; neither raises an Exception.
        last = self.stream.end("error" if isinstance(error, Exception) else "abort")
        self._put(last if self._growing is None else self._growing.take(last))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self._has_failed or (self.output.finished and not self._waiting):
            raise StopAsyncIteration
        item = await self._waiting.get()
        if isinstance(item, Exception):
            self._has_failed = True
            raise item
        return item

    async def pass_to(self, reader: Reader) -> None:
        """Give a reader every delta, until the last one. Raises what iterating would raise.

        This costs less than iterating: a delta that finds the reader ready needs no turn of the event loop.
        """
        try:
            async for delta in self:
                if not reader.take(delta):
                    await reader.until_ready()
                if not self._waiting:
                    self._reader = reader
        finally:
            self._reader = None

    def _take(self, news: list[RequestDelta] | Exception) -> None:
        """Read what the engine sends."""
        try:
            if isinstance(news, Exception):
                raise news
            changes: list[ChoiceDelta] = []
            for delta in news:
                if delta.error is not None:
                    break
                changes += self.stream.feed(delta)
            if self._growing is not None:
                changes = self._growing.take(changes)
            self._put(joined(changes) if len(changes) > 1 else changes)
            if delta.error is not None and (failure := failure_of(delta)) is not None:
                raise failure
            if self.stream.has_stopped:
                self._client.abort([], self.stream.take_stopped())
        # The iterator raises every error; nothing else would report this one.
        except Exception as error:
            self.fail(error)
            self._leave()

    def _put(self, deltas: Iterable[ChoiceDelta]) -> None:
        is_over = self.stream.output.finished
        for delta in deltas:
            # A reader is set only while nothing waits. The last delta wakes `pass_to`, which waits for the end.
            if self._reader is None or is_over:
                self._reader = None
                self._waiting.put(delta)
            elif not self._reader.take(delta):
                self._reader = None
            if self._on_delta is not None:
                self._on_delta(delta)


async def run_all(generations: Sequence[Generation], at_once: int) -> None:
    """Run several requests to their ends. at_once: see interleave. Raises the first error, and aborts the others."""
    async with aclosing(interleave(generations, at_once)) as deltas:
        async for _ in deltas:
            pass


async def interleave(
    generations: Sequence[Generation], at_once: int | None = None
) -> AsyncGenerator[tuple[int, ChoiceDelta]]:
    """Yield the deltas of several requests, each with its request's index. Closing the iterator aborts all requests.

    at_once: the number of requests that the engine has at the same time, so that many of them do not fill its queue;
    None: all. The timeouts of the others run meanwhile.
    """
    places = asyncio.Semaphore(at_once or len(generations))
    began = time.monotonic()
    # Further deltas wait in the Generations, which join and pack them.
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | Exception | None] = asyncio.Queue(1)

    async def follow(position: int, generation: Generation) -> None:
        try:
            await places.acquire()
            generation.begin_late(time.monotonic() - began)
            async with generation:
                try:
                    async for delta in generation:
                        await queue.put((position, delta))
                except Exception as error:
                    # Before leaving, which takes a moment in which later errors of other requests would come first.
                    await queue.put(error)
                    raise
            places.release()
            await queue.put(None)
        # As in Generation: the iterator must raise every error.
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(follow(position, generation)) for position, generation in enumerate(generations)]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
