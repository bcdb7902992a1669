"""Generation: one request under way, with all its choices. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineRequest, EngineStats, ModelInfo, RequestDelta
from pagewick.outputs import RequestOutput
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.request_stream import RequestStream, failure_of

OnDelta = Callable[[ChoiceDelta], None]


class Client(Protocol):
    """What text needs of an engine; EngineClient has it. is_alive: it takes requests, because health says "ready"."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def health(self) -> EngineHealth: ...
    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]: ...
    async def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None: ...
    async def close(self) -> None: ...


class Generation:
    """A request under way: an async iterator of ChoiceDeltas, those of different choices interleaved.

        async with engine.request(token_ids, params) as generation:
            async for delta in generation:
                ...

    Entering starts it; leaving aborts what is unfinished. `stream.output` is all of it so far.
    running: where it is listed by its id while it is entered. on_delta: called with every delta at once, and with a
    last one for each choice that is left unfinished.
    """

    def __init__(
        self,
        client: Client,
        request: EngineRequest,
        stream: RequestStream,
        running: dict[str, Generation],
        on_delta: OnDelta | None,
    ) -> None:
        self.stream = stream
        self._client = client
        self._request = request
        self._running = running
        self._on_delta = on_delta
        self._following: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()

    @property
    def output(self) -> RequestOutput:
        return self.stream.output

    def fail(self, error: Exception) -> None:
        """Raise the error where the iterator is waited for."""
        self._queue.put_nowait(error)

    async def __aenter__(self) -> Self:
        self._running[self.output.request_id] = self
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._following is not None:
                await _cancel([self._following])
        # Also where this task is cancelled while it leaves: whoever counts requests must hear how each one ended.
        finally:
            self._running.pop(self.output.request_id, None)
            # A client that leaves cancels the task or closes the iterator: neither is an Exception.
            self._put(self.stream.end("error" if isinstance(error, Exception) else "abort"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self.output.finished and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _follow(self) -> None:
        """Turn what the engine says into deltas in the queue."""
        try:
            async with aclosing(self._client.generate(self._request)) as deltas:
                async for delta in deltas:
                    failure = failure_of(delta)
                    if failure is not None:
                        raise failure
                    self._put(self.stream.feed(delta))
                    if stopped := self.stream.take_stopped():
                        await self._client.abort([], stopped)
        # Whatever it is, it must reach the one who waits; in this task it would be lost.
        except Exception as error:
            self.fail(error)

    def _put(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            self._queue.put_nowait(delta)
            if self._on_delta is not None:
                self._on_delta(delta)


async def interleave(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, ChoiceDelta]]:
    """The deltas of several requests as they come, each with its request's position. Closing it aborts them all."""
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | Exception | None] = asyncio.Queue()

    async def follow(position: int, generation: Generation) -> None:
        try:
            async with generation:
                try:
                    async for delta in generation:
                        queue.put_nowait((position, delta))
                except Exception as error:
                    # Leaving takes a moment, in which others, who came later, would be heard first.
                    queue.put_nowait(error)
                    raise
            queue.put_nowait(None)
        # As in Generation: it must reach the one who waits.
        except Exception as error:
            queue.put_nowait(error)

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
