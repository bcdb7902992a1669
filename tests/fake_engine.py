"""An engine without a model, for tests of what is above it: it spells the texts it is told to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pagewick.async_llm import AsyncEngine
from pagewick.engine.messages import EngineRequest, EngineStats, ModelInfo, RequestDelta, TokenLogprobs
from pagewick.errors import EngineDeadError, EngineError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
END = TOKENIZER.eos_token_ids[0]
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
MAX_MODEL_LEN = 512


def spell(text: str) -> list[int]:
    """One token per byte."""
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


class FakeClient:
    """Answers choice i with texts[i % len(texts)], one token per delta, then the end-of-sequence token.

    Before token number `pause_at` it waits until `go_on` is called; there it fails instead if `failure` is set. It
    keeps the requests it got, the ids of those that ended and those that were aborted.
    """

    def __init__(self) -> None:
        self.info = ModelInfo(
            model_path="/models/fake", architecture="Fake", dtype="float32", device="cpu", kernels="reference",
            vocab_size=TOKENIZER.vocab_size, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=512,
            block_size=16, num_kv_blocks=100, kv_cache_bytes=1, num_parameters=1, tensor_parallel_size=1,
        )  # fmt: skip
        self.stats = EngineStats(num_blocks=100, num_free_blocks=90, num_referenced_blocks=5, prompt_tokens=7)
        self.is_alive = True
        self.is_closed = False
        self.reset()

    def reset(self) -> None:
        self.texts: Sequence[str] = ["Hello 😀!"]
        self.pause_at: int | None = None
        self.failure: Exception | None = None
        self.num_cached_tokens = 0
        self.requests: list[EngineRequest] = []
        self.running: set[str] = set()
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self._resume: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._abort_events: dict[str, asyncio.Event] = {}

    @property
    def num_paused(self) -> int:
        return len(self._resume)

    def go_on(self) -> None:
        """May be called from another thread."""
        for loop, event in self._resume:
            loop.call_soon_threadsafe(event.set)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]:
        self.requests.append(request)
        self.running.add(request.request_id)
        is_finished = False
        try:
            async for delta in self._deltas(request):
                is_finished = delta.finish_reason is not None
                if is_finished:
                    self.finished.append(request.request_id)
                yield delta
        finally:
            self.running.discard(request.request_id)
            if not is_finished:
                self.aborted.append(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._abort_events[request_id].set()

    async def close(self) -> None:
        self.is_closed = True
        self.is_alive = False

    async def _deltas(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]:
        self._abort_events[request.request_id] = asyncio.Event()
        token_ids = [*spell(self.texts[request.choice_index % len(self.texts)]), END]
        for position, token_id in enumerate(token_ids):
            if position == self.pause_at:
                await self._pause(request.request_id)
            await asyncio.sleep(0)
            if self._abort_events[request.request_id].is_set():
                yield RequestDelta(request_id=request.request_id, finish_reason="abort")
                return
            yield self._delta(request, position, token_id)
            if position + 1 == request.params.max_tokens:
                return

    async def _pause(self, request_id: str) -> None:
        if self.failure is not None:
            raise self.failure
        event = self._abort_events[request_id]
        resume = asyncio.Event()
        self._resume.append((asyncio.get_running_loop(), resume))
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(resume.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _delta(self, request: EngineRequest, position: int, token_id: int) -> RequestDelta:
        delta = RequestDelta(request_id=request.request_id, token_ids=[token_id])
        delta.num_cached_tokens = self.num_cached_tokens
        if request.params.logprobs is not None:
            top = [(token_id, -0.25), (END, -1.5), (BYTE_IDS[b"z"], float("-inf"))]
            delta.logprobs = [TokenLogprobs(token_id, -0.25, 1, top[: request.params.logprobs])]
        if request.params.prompt_logprobs is not None and position == 0:
            delta.prompt_logprobs = [TokenLogprobs(one, -2.0, 3, []) for one in request.prompt_token_ids[1:]]
        if token_id == END or token_id in request.params.stop_token_ids:
            delta.finish_reason, delta.stop_token_id = "stop", token_id
        elif position + 1 == request.params.max_tokens:
            delta.finish_reason = "length"
        return delta


def fake_engine(client: FakeClient) -> AsyncEngine:
    """The real text stack over a fake client."""
    return AsyncEngine(client, TOKENIZER, ChatTemplate({"default": QWEN_TEMPLATE}, TOKENIZER))


NAN_ROW = EngineError("the model gave no number for this request")
DEATH = EngineDeadError("the engine process ended")
