"""Generation: one running request with all its choices. Imports no torch."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineRequest, EngineStats, ModelInfo, RequestDelta
from pagewick.outputs import RequestOutput
from pagewick.text.output_stream import ChoiceDelta, PositionLogprobs
from pagewick.text.request_stream import RequestStream, failure_of

OnDelta = Callable[[ChoiceDelta], None]

# A reader that keeps up gets every delta by itself. Once this number of deltas wait, those of a choice are joined.
MAX_WAITING_DELTAS = 16
# A joined delta has no more positions with log-probabilities than this, so that none becomes a huge event.
MAX_JOINED_LOGPROBS = 16

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[PositionLogprobs])


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
        self._growing = None if stream_interval == 1 else _Growing(stream_interval)
        self._leave: Callable[[], None] = lambda: None
        self._waiting = _Deltas()
        self._reader: Reader | None = None  # gets deltas directly

    @property
    def output(self) -> RequestOutput:
        return self.stream.output

    def fail(self, error: Exception) -> None:
        """Make the iterator raise an error, after all deltas that came before it."""
        self._reader = None
        for delta in self._growing.rest() if self._growing is not None else ():
            self._waiting.put(delta)
        self._waiting.put(error)

    async def __aenter__(self) -> Self:
        self._running[self.output.request_id] = self
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
        self._running.pop(self.output.request_id, None)
        # A client that disconnects cancels the task or closes the iterator; neither raises an Exception.
        last = self.stream.end("error" if isinstance(error, Exception) else "abort")
        self._put(last if self._growing is None else self._growing.take(last))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self.output.finished and not self._waiting:
            raise StopAsyncIteration
        item = await self._waiting.get()
        if isinstance(item, Exception):
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
            self._put(_joined(changes) if len(changes) > 1 else changes)
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


def _joined(changes: Iterable[ChoiceDelta]) -> list[ChoiceDelta]:
    """Join the deltas of each choice; one with log-probabilities stays alone, because an event with many is large."""
    latest: dict[int, ChoiceDelta] = {}
    result = []
    for change in changes:
        known = latest.get(change.index)
        if known is None or change.logprobs is not None:
            latest[change.index] = change
            result.append(change)
        else:
            known.add(change)
    return result


class _Growing:
    """Joins the deltas of each choice until they have `interval` tokens. The first and the last do not wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, ChoiceDelta] = {}

    def take(self, changes: Iterable[ChoiceDelta]) -> list[ChoiceDelta]:
        """Return the deltas that need not wait any longer."""
        ready = []
        for change in changes:
            held = self._held.get(change.index)
            if held is None:
                held = change
            else:
                held.add(change)
                if not self._is_ready(held):
                    continue
            ready.append(held)
            self._held[change.index] = ChoiceDelta(change.index)
        return ready

    def rest(self) -> list[ChoiceDelta]:
        """Return everything that waits, because nothing more will come."""
        held, self._held = self._held, {}
        return [one for one in held.values() if one.token_ids]

    def _is_ready(self, held: ChoiceDelta) -> bool:
        num_tokens = len(held.token_ids)
        is_large = num_tokens >= self._interval or len(held.logprobs or ()) >= MAX_JOINED_LOGPROBS
        return is_large or held.finish_reason is not None


class _Deltas:
    """A queue of deltas for one reader."""

    def __init__(self) -> None:
        self._items: deque[ChoiceDelta | _Joined | Exception] = deque()
        self._joined: dict[int, _Joined] = {}  # by choice: the waiting delta to which later ones are added
        self._is_filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ChoiceDelta | Exception) -> None:
        if isinstance(item, ChoiceDelta) and len(self) >= MAX_WAITING_DELTAS:
            joined = self._joined.get(item.index)
            if joined is None or joined.is_full:
                joined = self._joined[item.index] = _Joined(item)
                self._items.append(joined)
            joined.add(item)
        else:
            self._items.append(item)
        self._is_filled.set()

    async def get(self) -> ChoiceDelta | Exception:
        while not self._items:
            self._is_filled.clear()
            await self._is_filled.wait()
        item = self._items.popleft()
        if not isinstance(item, _Joined):
            return item
        whole = item.whole()
        if self._joined[whole.index] is item:
            del self._joined[whole.index]
        return whole


class _Joined:
    """Several deltas of a choice, as one.

    It is full when it has enough log-probabilities; these are then packed, because as objects they take a multiple of
    the memory that they will take as text.
    """

    def __init__(self, first: ChoiceDelta) -> None:
        # A new one, because on_delta may have kept the deltas.
        self._delta = ChoiceDelta(first.index, logprobs=None if first.logprobs is None else [])
        self._packed = b""

    @property
    def is_full(self) -> bool:
        return bool(self._packed)

    def add(self, delta: ChoiceDelta) -> None:
        self._delta.add(delta)
        if len(self._delta.logprobs or ()) >= MAX_JOINED_LOGPROBS:
            self._packed = zlib.compress(_encoder.encode(self._delta.logprobs), 1)
            self._delta.logprobs = []

    def whole(self) -> ChoiceDelta:
        """Return the joined delta."""
        if self._packed:
            self._delta.logprobs = _decoder.decode(zlib.decompress(self._packed))
        return self._delta


async def interleave(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, ChoiceDelta]]:
    """Yield the deltas of several requests, each with its request's index. Closing the iterator aborts all requests."""
    # Further deltas wait in the Generations, which join and pack them.
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | Exception | None] = asyncio.Queue(1)

    async def follow(position: int, generation: Generation) -> None:
        try:
            async with generation:
                try:
                    async for delta in generation:
                        await queue.put((position, delta))
                except Exception as error:
                    # Before leaving, which takes a moment in which later errors of other requests would come first.
                    await queue.put(error)
                    raise
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
