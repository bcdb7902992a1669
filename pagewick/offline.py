"""OfflineRunner: requests run to their end in the caller's thread, by calling Engine.step. Used by LLM."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from pagewick.engine.messages import RequestDelta
from pagewick.errors import EngineError, InvalidRequestError
from pagewick.generation import choice_requests
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import OutputStream, logprob_map
from pagewick.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine

SEED_BITS = 63

OnStep = Callable[[Sequence[RequestOutput]], None]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine reads it, and its text if it has one."""

    text: str | None
    token_ids: list[int]


class OfflineRunner:
    """Starts requests and steps the engine until they are done; one thread only.

    seed: where the seeds of requests without one are drawn from; None draws others every time.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, seed: int | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._seeds = random.Random(seed)
        self._num_requests = 0
        self._running: dict[str, _Choice] = {}

    def run(
        self,
        prompts: Sequence[EncodedPrompt],
        all_params: Sequence[SamplingParams],
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts together, each with its params.

        If one is refused or fails, or Ctrl-C comes, the others are aborted.
        Raises InvalidRequestError, EngineError.
        """
        requests: list[_Request] = []
        with self._aborting(requests):
            for prompt, params in zip(prompts, all_params, strict=True):
                requests.append(self._make_request(prompt, params))
                try:
                    self._add(requests[-1])
                except InvalidRequestError as error:
                    error.add_note(f"(prompt {len(requests)} of {len(prompts)})")
                    raise
            outputs = [request.output for request in requests]
            while not all(output.finished for output in outputs):
                self._step()
                for request in requests:
                    request.raise_error()
                if on_step is not None:
                    on_step(outputs)
        return outputs

    def stream(self, prompt: EncodedPrompt, params: SamplingParams) -> Generator[str]:
        """The text of one choice in pieces. Closing the iterator aborts the request. Raises as `run` does."""
        request = self._make_request(prompt, params)
        with self._aborting([request]):
            self._add(request)
            # Other calls step the engine too: there may be text without a step, even after the last one.
            while request.unread_text or not request.output.finished:
                if not request.unread_text:
                    self._step()
                request.raise_error()
                if text := request.take_text():
                    yield text

    def _step(self) -> None:
        """Advance all requests by one step: the caller's, and those of streams that are still open."""
        assert self._engine.has_work, "the engine has lost a request"
        with _uninterrupted():
            stopped = []
            for delta in self._engine.step():
                choice = self._running.get(delta.request_id)
                if choice is None:
                    continue
                choice.feed(delta, self._tokenizer)
                if choice.is_finished:
                    del self._running[delta.request_id]
                    if delta.finish_reason is None:
                        stopped.append(delta.request_id)
            if stopped:
                self._engine.abort(stopped)

    def _make_request(self, prompt: EncodedPrompt, params: SamplingParams) -> _Request:
        request_id = str(self._num_requests)
        self._num_requests += 1
        streams = [OutputStream(self._tokenizer, params, index) for index in range(params.n)]
        outputs = [stream.output for stream in streams]
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, outputs)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        return _Request(output, params, streams)

    def _add(self, request: _Request) -> None:
        """Queue one sequence for each choice."""
        seed = self._seeds.getrandbits(SEED_BITS) if request.params.seed is None else request.params.seed
        output = request.output
        for engine_request in choice_requests(output.request_id, output.prompt_token_ids, request.params, seed):
            self._engine.add(engine_request)
            stream = request.streams[engine_request.choice_index]
            self._running[engine_request.request_id] = _Choice(request, stream)

    @contextmanager
    def _aborting(self, requests: Sequence[_Request]) -> Iterator[None]:
        """On the way out, whatever the reason, the engine forgets what is unfinished of these requests."""
        try:
            yield
        finally:
            left = [
                request_id
                for request_id, choice in self._running.items()
                if any(choice.request is request for request in requests)
            ]
            for request_id in left:
                del self._running[request_id]
            if left:
                self._engine.abort(left)


@dataclass(slots=True)
class _Request:
    """A prompt on its way: the output as far as it is, and, of a stream, the text that has not been taken yet."""

    output: RequestOutput
    params: SamplingParams
    streams: list[OutputStream]
    error: str | None = None
    unread_text: str = ""

    def raise_error(self) -> None:
        if self.error is not None:
            raise EngineError(f"request {self.output.request_id}: {self.error}")

    def take_text(self) -> str:
        text, self.unread_text = self.unread_text, ""
        return text


@dataclass(frozen=True, slots=True)
class _Choice:
    """One sequence of a request."""

    request: _Request
    stream: OutputStream

    @property
    def is_finished(self) -> bool:
        return self.stream.output.finish_reason is not None

    def feed(self, delta: RequestDelta, tokenizer: Tokenizer) -> None:
        request, output = self.request, self.request.output
        request.error = request.error or delta.error
        request.unread_text += self.stream.feed(delta).text
        if output.prompt_logprobs is not None and delta.prompt_logprobs:
            output.prompt_logprobs += [logprob_map(tokenizer, position) for position in delta.prompt_logprobs]
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        output.finished = all(choice.finish_reason is not None for choice in output.outputs)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end: half a step would leave the engine's books wrong."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    for number, frame in interrupts:
        handler(number, frame)
