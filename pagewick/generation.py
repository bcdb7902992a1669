"""Generation: one request under way, with all its choices. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from pagewick.engine.messages import EngineRequest, EngineStats, ModelInfo, RequestDelta
from pagewick.errors import EngineError
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta, OutputStream, logprob_map
from pagewick.text.tokenizer import Tokenizer

OnDelta = Callable[[ChoiceDelta], None]


class Client(Protocol):
    """What text needs of an engine; EngineClient has it."""

    info: ModelInfo
    stats: EngineStats

    @property
    def is_alive(self) -> bool: ...
    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    async def close(self) -> None: ...


class Generation:
    """A request under way: an async iterator of ChoiceDeltas, those of different choices interleaved.

        async with engine.request(token_ids, params) as generation:
            async for delta in generation:
                ...

    Entering starts it; leaving aborts what is unfinished. `output` is all of it so far.
    running: where it is listed by its id while it is entered. on_delta: called with every delta at once, and with a
    last one for each choice that is left unfinished.
    """

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        running: dict[str, Generation],
        requests: Sequence[EngineRequest],
        params: SamplingParams,
        prompt: str | None,
        on_delta: OnDelta | None,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._running = running
        self._choices = [(request, OutputStream(tokenizer, params, request.choice_index)) for request in requests]
        self._on_delta = on_delta
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()
        request_id, _, _ = requests[0].request_id.rpartition("-")
        outputs = [stream.output for _, stream in self._choices]
        self.output = RequestOutput(request_id, prompt, requests[0].prompt_token_ids, outputs)
        if params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self.output.outputs)

    def unfinished_ids(self) -> list[str]:
        """The engine's ids of the choices that still run."""
        return [request.request_id for request, stream in self._choices if stream.output.finish_reason is None]

    def fail(self, error: Exception) -> None:
        """Raise the error where the iterator is waited for."""
        self._queue.put_nowait(error)

    async def __aenter__(self) -> Self:
        self._running[self.output.request_id] = self
        self._tasks = [asyncio.create_task(self._follow(request, stream)) for request, stream in self._choices]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _cancel(self._tasks)
        for choice in self.output.outputs:
            if choice.finish_reason is None:
                choice.finish_reason = "error" if isinstance(error, EngineError) else "abort"
                self._put(ChoiceDelta(choice.index, finish_reason=choice.finish_reason))
        self._running.pop(self.output.request_id, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self.output.finished and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _follow(self, request: EngineRequest, stream: OutputStream) -> None:
        """Turn what the engine says of one choice into deltas in the queue."""
        try:
            # Closing it aborts the engine's request if a stop string has ended the choice.
            async with aclosing(self._client.generate(request)) as deltas:
                async for delta in deltas:
                    if delta.error is not None:
                        raise EngineError(delta.error)
                    self._note_prompt(delta)
                    self._put(stream.feed(delta))
                    if stream.is_stopped:
                        break
        # Whatever it is, it must reach the one who waits; in this task it would be lost.
        except Exception as error:
            self.fail(error)

    def _put(self, delta: ChoiceDelta) -> None:
        self.output.finished = not self.unfinished_ids()
        self._queue.put_nowait(delta)
        if self._on_delta is not None:
            self._on_delta(delta)

    def _note_prompt(self, delta: RequestDelta) -> None:
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs and self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs += [logprob_map(self._tokenizer, one) for one in delta.prompt_logprobs]


def choice_requests(
    request_id: str, prompt_token_ids: list[int], params: SamplingParams, seed: int
) -> list[EngineRequest]:
    """What the engine is asked: one sequence for each choice.

    Stop strings stay here, because the engine knows no text; and one choice reports the prompt for all.
    """
    first = replace(params, n=1, stop=())
    other = replace(first, prompt_logprobs=None)
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=prompt_token_ids,
            params=other if index else first,
            seed=seed,
            choice_index=index,
        )
        for index in range(params.n)
    ]


async def interleave(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, ChoiceDelta]]:
    """The deltas of several requests as they come, each with its request's position. Closing it aborts them all."""
    queue: asyncio.Queue[tuple[int, ChoiceDelta] | Exception | None] = asyncio.Queue()

    async def follow(position: int, generation: Generation) -> None:
        try:
            async with generation:
                async for delta in generation:
                    queue.put_nowait((position, delta))
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
