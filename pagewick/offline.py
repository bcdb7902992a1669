"""OfflineRunner: runs requests to their end in the caller's thread by calling Engine.step. Used by LLM."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

from pagewick.engine.messages import EngineRequest, ImageInput, RequestDelta, RequestOptions
from pagewick.errors import InvalidRequestError, PagewickError
from pagewick.outputs import RequestOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.request_maker import PlanFields, RequestMaker
from pagewick.text.request_stream import RequestStream, failure_of

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine

SEED_BITS = 63

OnStep = Callable[[Sequence[RequestOutput]], None]

_open_engines: WeakSet[Engine] = WeakSet()
# The engines of a fork are its parent's, which goes on using their ranks.
os.register_at_fork(after_in_child=_open_engines.clear)


@atexit.register
def _close_engines() -> None:
    """End the other ranks of the engines that a script has left open, which would otherwise report a lost rank 0."""
    for engine in list(_open_engines):
        # A stream may be unfinished, and the threads that it needs have ended by now.
        with suppress(Exception):
            engine.close()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's token ids, its text if it was given as text, and the images that its placeholders stand for."""

    text: str | None
    token_ids: list[int]
    images: Sequence[ImageInput] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt with the arguments of RequestMaker.plan."""

    prompt: EncodedPrompt
    params: SamplingParams
    options: RequestOptions | None
    fields: PlanFields
    name: str | None = None  # for errors, in place of the prompt's number


class OfflineRunner:
    """Starts requests and steps the engine until they are done. Threads that use it at the same time take turns.

    seed: seeds the generator of seeds for requests without one; None: different seeds every time.
    """

    def __init__(self, engine: Engine, requests: RequestMaker, seed: int | None) -> None:
        self._engine = engine
        self._requests = requests
        self._seeds = random.Random(seed)
        self._num_requests = 0
        self._running: dict[str, _Request] = {}
        self._turn = threading.RLock()
        _open_engines.add(engine)

    def close(self) -> None:
        """Close the engine, too; waits for the calls of other threads."""
        with self._turn:
            _open_engines.discard(self._engine)
            self._requests.close()
            self._engine.close()

    def run(self, jobs: Sequence[Job], on_step: OnStep | None = None) -> list[RequestOutput]:
        """Run all jobs together.

        If one is refused or fails, or on Ctrl-C, the others are aborted.
        Raises InvalidRequestError, EngineError.
        """
        requests: list[_Request] = []
        with self._turn, self._aborting(requests), _Interrupts() as interrupts:
            for number, job in enumerate(jobs, start=1):
                try:
                    requests.append(self._make_request(job))
                    self._add(requests[-1])
                except InvalidRequestError as error:
                    if job.name is not None:
                        error.args = (f"{job.name}: {error}",)
                    else:
                        error.add_note(f"(prompt {number} of {len(jobs)})")
                    raise
            outputs = [request.output for request in requests]
            # Do not look at every request in every step: there may be a hundred thousand.
            left = {request.wanted.request_id for request in requests}
            while left:
                for request in self._step(interrupts):
                    if request.wanted.request_id in left:
                        request.raise_failure()
                        left -= {request.wanted.request_id} if request.output.finished else set()
                if on_step is not None:
                    on_step(outputs)
        return outputs

    def stream(self, job: Job) -> Generator[RequestOutput]:
        """Yield the same RequestOutput as it grows. Closing the iterator aborts the request. Raises as `run` does."""
        with self._turn:
            request = self._make_request(job)
        with self._aborting([request]):
            self._add(request)
            # Other calls step the engine too, so there may be news without a step, even after the last step.
            while request.has_news or not request.output.finished:
                if self._advance(request):
                    yield request.output

    def _advance(self, request: _Request) -> bool:
        """Step the engine unless another call has served the request; return whether its output has grown."""
        with self._turn:
            if not (request.has_news or request.output.finished):
                with _Interrupts() as interrupts:
                    self._step(interrupts)
            request.raise_failure()
            has_news, request.has_news = request.has_news, False
            return has_news

    def _step(self, interrupts: _Interrupts) -> list[_Request]:
        """Advance all requests by one step, including those of other open streams; return those that have news."""
        assert self._engine.has_work, "the engine has lost a request"
        served: list[_Request] = []
        with interrupts.held_back():
            stopped: list[tuple[str, int]] = []
            for delta in self._engine.step():
                request = self._running.get(delta.request_id)
                if request is None:
                    continue
                request.feed(delta)
                served.append(request)
                stopped += request.stream.take_stopped()
                if request.output.finished:
                    del self._running[delta.request_id]
            if stopped:
                self._engine.abort([], stopped)
        return served

    def _make_request(self, job: Job) -> _Request:
        """Raises InvalidRequestError."""
        plan = self._requests.plan(job.params, options=job.options, **job.fields)
        wanted, stream = self._requests.make(
            str(self._num_requests),
            job.prompt.token_ids,
            plan,
            seed=self._seeds.getrandbits(SEED_BITS) if job.params.seed is None else job.params.seed,
            prompt=job.prompt.text,
            images=job.prompt.images,
        )
        self._num_requests += 1
        return _Request(wanted, stream)

    def _add(self, request: _Request) -> None:
        """Add a request to the engine's queue. Raises InvalidRequestError."""
        with self._turn:
            # This comes first, so that Ctrl-C in between aborts it; the engine ignores the abort of an unknown request.
            self._running[request.wanted.request_id] = request
            self._engine.add(request.wanted)

    @contextmanager
    def _aborting(self, requests: Sequence[_Request]) -> Iterator[None]:
        """On exit, whatever the reason, abort the requests that are unfinished."""
        try:
            yield
        finally:
            ids = [request.wanted.request_id for request in requests]
            with self._turn:
                left = [request_id for request_id in ids if request_id in self._running]
                for request_id in left:
                    del self._running[request_id]
                if left:
                    self._engine.abort(left)


@dataclass(slots=True)
class _Request:
    """A running request. has_news: its output has grown since this was set to False."""

    wanted: EngineRequest
    stream: RequestStream
    failure: PagewickError | None = None
    has_news: bool = False

    @property
    def output(self) -> RequestOutput:
        return self.stream.output

    def feed(self, delta: RequestDelta) -> None:
        self.failure = self.failure or failure_of(delta, f"request {delta.request_id}: ")
        self.has_news |= bool(self.stream.feed(delta))

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


class _Interrupts:
    """Delays Ctrl-C while a step runs: half a step would leave the engine's state inconsistent."""

    def __init__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._handler = handler if is_main and callable(handler) else None
        self._is_held = False
        self._held_back: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> _Interrupts:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Handle interrupts that arrive inside this context at its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        while self._held_back and self._handler is not None:
            self._handler(*self._held_back.pop(0))

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._held_back.append((number, frame))
        elif self._handler is not None:
            self._handler(number, frame)


@contextmanager
def progress_bar(total: int) -> Iterator[OnStep]:
    """Show a progress bar of finished prompts on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total)

        def show(outputs: Sequence[RequestOutput]) -> None:
            progress.update(task, completed=sum(output.finished for output in outputs))

        yield show
