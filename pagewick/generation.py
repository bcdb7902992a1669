"""Generation: one request under way, with all its choices. Imports no torch."""

from __future__ import annotations

import asyncio
from collections import deque
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

# Who reads along gets every delta by itself. Of what comes when so many wait, the deltas of one choice are joined.
MAX_WAITING_DELTAS = 64


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

    Entering starts it; leaving aborts what is unfinished. `stream.output` is all of it so far. It does not wait for who
    reads slowly, since the engine does not; of them it keeps no more deltas than MAX_WAITING_DELTAS and one per choice.
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
        self._waiting = _Deltas()

    @property
    def output(self) -> RequestOutput:
        return self.stream.output

    def fail(self, error: Exception) -> None:
        """Raise the error where the iterator is waited for."""
        self._waiting.put(error)

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
        if self.output.finished and not self._waiting:
            raise StopAsyncIteration
        item = await self._waiting.get()
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
            self._waiting.put(delta)
            if self._on_delta is not None:
                self._on_delta(delta)


class _Deltas:
    """What nobody has taken yet, in order; for one reader."""

    def __init__(self) -> None:
        self._items: deque[ChoiceDelta | Exception] = deque()
        self._joined: dict[int, ChoiceDelta] = {}  # by choice: of those waiting, the one that takes what comes
        self._is_filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ChoiceDelta | Exception) -> None:
        if isinstance(item, ChoiceDelta) and len(self) >= MAX_WAITING_DELTAS:
            if (joined := self._joined.get(item.index)) is not None:
                joined.add(item)
                return
            # Not the delta itself: others have seen it, and may keep it.
            whole = self._joined[item.index] = ChoiceDelta(item.index, logprobs=None if item.logprobs is None else [])
            whole.add(item)
            item = whole
        self._items.append(item)
        self._is_filled.set()

    async def get(self) -> ChoiceDelta | Exception:
        while not self._items:
            self._is_filled.clear()
            await self._is_filled.wait()
        item = self._items.popleft()
        if isinstance(item, ChoiceDelta) and self._joined.get(item.index) is item:
            del self._joined[item.index]
        return item


async def interleave(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, ChoiceDelta]]:
    """The deltas of several requests as they come, each with its request's position. Closing it aborts them all."""
    # What is not taken waits in the Generations, which know how to keep it small.
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | Exception | None] = asyncio.Queue(MAX_WAITING_DELTAS)

    async def follow(position: int, generation: Generation) -> None:
        try:
            async with generation:
                try:
                    async for delta in generation:
                        await queue.put((position, delta))
                except Exception as error:
                    # Leaving takes a moment, in which others, who came later, would be heard first.
                    await queue.put(error)
                    raise
            await queue.put(None)
        # As in Generation: it must reach the one who waits.
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
