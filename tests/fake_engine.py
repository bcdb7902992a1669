"""An engine without a model, for tests of the layers above it: it generates the texts that a test sets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from pagewick.async_llm import AsyncEngine
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta, TokenLogprobs
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import EngineDeadError, EngineError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
# To compile it takes longer than most tests that use it.
TEMPLATE = ChatTemplate({"default": QWEN_TEMPLATE}, TOKENIZER)
END = TOKENIZER.eos_token_ids[0]
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
MAX_MODEL_LEN = 512


def spell(text: str) -> list[int]:
    """Return the token ids of a text, one for each byte."""
    return list(_spelled(text))


@functools.lru_cache(64)
def _spelled(text: str) -> tuple[int, ...]:
    """Compute the ids of a text once: a test reads them again for every token."""
    return tuple(BYTE_IDS[bytes([byte])] for byte in text.encode())


class FakeClient:
    """An engine client that generates texts[i % len(texts)] for choice i, one token per delta, then the end token.

    The choices of a request take turns; beams come whole, at the end. A token of choice i has the log-probability
    logprobs[i % len(logprobs)]. Before token number `pause_at` the client waits until `go_on` is called. If `failure`
    is set, it fails there instead: it raises an exception, or yields a delta with the fields of a dictionary. `extras`
    are more fields of the first delta. By its own clock, which the deltas report, it takes 10 ms for a token.

    It records requests, the ids of finished and of aborted requests, and aborted choices as (request id, choice index).
    Tests may set `health`.
    """

    def __init__(self) -> None:
        self.info = ModelInfo(
            model_path="/models/fake", architecture="Fake", dtype="float32", device="cpu", kernels="reference",
            vocab_size=TOKENIZER.vocab_size, embedding_size=4, max_model_len=MAX_MODEL_LEN, max_num_seqs=8,
            max_num_batched_tokens=512,
            block_size=16, num_kv_blocks=100, kv_cache_bytes=1, num_parameters=1, tensor_parallel_size=1,
        )  # fmt: skip
        self.stats = EngineStats(num_blocks=50, num_free_blocks=40, num_referenced_blocks=5, prompt_tokens=7)
        self.health = EngineHealth("ready")
        self.is_closed = False
        self.reset()

    def reset(self) -> None:
        self.texts: Sequence[str] = ["Hello 😀!"]
        self.logprobs: Sequence[float] = [-0.25]
        self.pause_at: int | None = None
        self.failure: Exception | dict[str, Any] | None = None
        self.extras: dict[str, Any] = {}
        self.requests: list[EngineRequest] = []
        self.running: set[str] = set()
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.aborted_choices: list[tuple[str, int]] = []
        self._resume: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._wakers: dict[str, asyncio.Event] = {}
        self._unfinished: dict[str, set[int]] = {}
        self._told: dict[str, list[RequestDelta]] = {}

    @property
    def is_alive(self) -> bool:
        return self.health.state == "ready"

    @is_alive.setter
    def is_alive(self, value: bool) -> None:
        self.health = EngineHealth("ready" if value else "dead")

    @property
    def num_paused(self) -> int:
        return len(self._resume)

    def go_on(self) -> None:
        """Let paused requests continue; may be called from another thread."""
        for loop, event in self._resume:
            loop.call_soon_threadsafe(event.set)

    def open(
        self, request: EngineRequest, take: Callable[[list[RequestDelta] | Exception], None]
    ) -> Callable[[], None]:
        async def follow() -> None:
            try:
                async for delta in self._generate(request):
                    take([delta])
            except Exception as error:
                self._end(request.request_id)
                take(error)

        task = asyncio.create_task(follow())

        def leave() -> None:
            task.cancel()
            self._end(request.request_id)

        return leave

    def _end(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.remove(request_id)
            if self._unfinished[request_id]:
                self.aborted.append(request_id)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]:
        request_id = request.request_id
        assert request_id not in self.running, "the id is in use"
        self.requests.append(request)
        self.running.add(request_id)
        self._wakers[request_id] = asyncio.Event()
        self._told[request_id] = []
        unfinished = self._unfinished[request_id] = set(range(request.params.n))
        async for delta in self._deltas(request, unfinished):
            if delta.finish_reason is not None:
                unfinished.discard(delta.choice_index)
            yield delta
            while told := self._told[request_id]:
                yield told.pop(0)
        self.finished.append(request_id)
        self.running.discard(request_id)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        self.aborted += request_ids
        self.aborted_choices += choices
        whole = [(request_id, index) for request_id in request_ids for index in range(128)]
        for request_id, index in (*whole, *choices):
            if index in self._unfinished[request_id]:
                self._unfinished[request_id].remove(index)
                delta = RequestDelta(request_id=request_id, choice_index=index, finish_reason="abort")
                self._told[request_id].append(delta)
                self._wakers[request_id].set()

    async def close(self) -> None:
        self.is_closed = True
        self.health = EngineHealth("dead", "it was closed")

    async def _deltas(self, request: EngineRequest, unfinished: set[int]) -> AsyncGenerator[RequestDelta]:
        if request.params.use_beam_search:
            for index in range(request.params.n):
                yield self._beam(request, index)
            return
        position = 0
        while unfinished:
            if position == self.pause_at:
                if isinstance(self.failure, dict):
                    yield RequestDelta(request_id=request.request_id, finish_reason="error", **self.failure)
                await self._pause(request.request_id)
            while told := self._told[request.request_id]:
                yield told.pop(0)
            for index in sorted(unfinished):
                await asyncio.sleep(0)
                if index in unfinished:
                    yield self._delta(request, index, position)
            position += 1

    async def _pause(self, request_id: str) -> None:
        if isinstance(self.failure, Exception):
            raise self.failure
        event = self._wakers[request_id]
        resume = asyncio.Event()
        self._resume.append((asyncio.get_running_loop(), resume))
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(resume.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _token_ids(self, index: int) -> list[int]:
        return [*_spelled(self.texts[index % len(self.texts)]), END]

    def _delta(self, request: EngineRequest, index: int, position: int) -> RequestDelta:
        token_id = self._token_ids(index)[position]
        delta = RequestDelta(request_id=request.request_id, choice_index=index, token_ids=[token_id])
        delta.decode_s = position / 100
        if request.params.logprobs is not None:
            logprob = self.logprobs[index % len(self.logprobs)]
            top = [(token_id, logprob), (END, -1.5), (BYTE_IDS[b"z"], float("-inf"))]
            delta.logprobs = [TokenLogprobs(token_id, logprob, 1, top[: request.params.logprobs])]
        if position == index == 0:
            for name, value in self.extras.items():
                setattr(delta, name, value)
            if request.params.prompt_logprobs is not None:
                delta.prompt_logprobs = [TokenLogprobs(one, -2.0, 3, []) for one in request.prompt_token_ids[1:]]
        if token_id == END or token_id in request.params.stop_token_ids:
            delta.finish_reason, delta.stop_token_id = "stop", token_id
        elif position + 1 == request.params.max_tokens:
            delta.finish_reason = "length"
        return delta

    def _beam(self, request: EngineRequest, index: int) -> RequestDelta:
        return RequestDelta(
            request_id=request.request_id,
            choice_index=index,
            token_ids=self._token_ids(index),
            finish_reason="stop",
            stop_token_id=END,
            cumulative_logprob=-1.5 - index,
        )


def fake_engine(client: FakeClient) -> AsyncEngine:
    """Return the real text stack over a fake client."""
    return AsyncEngine(client, TOKENIZER, TEMPLATE)


NAN_ROW = EngineError("the model gave no number for this request")
DEATH = EngineDeadError("the engine process ended")
