"""RequestLog: a line in the log, measurements and a trace for every request that is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewick.generation import Generation
from pagewick.log import get_logger, printable
from pagewick.outputs import FinishReason, PartKind
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.metrics import FinishedRequest, Metrics
from pagewick.text.output_stream import ChoiceDelta

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from pagewick.server.telemetry.tracing import Tracing

# Upper limit for a logged prompt or response.
MAX_LOGGED_CHARS = 2000
MAX_LOGGED_NAME = 100
# A request with several choices ends as the worst of them does.
_WORST_FIRST: tuple[FinishReason, ...] = ("error", "abort", "length", "stop")

_PART_NAMES = {
    PartKind.TEXT: "answer",
    PartKind.REASONING: "thoughts",
    PartKind.TOOL_CALL: "tool call",
    PartKind.REFUSAL: "refusal",
}

_logger = get_logger(__name__)


class RefusalLog:
    """Logs requests that were answered with an error, if the settings say so."""

    def __init__(self, settings: ServerSettings) -> None:
        self._logs_requests = settings.log_requests

    def refused(self, request_id: str, method: str, handler: str, status: int, code: str) -> None:
        """Log one. Only its id is the client's, and that was checked."""
        if self._logs_requests:
            line = f"request {request_id} {method} {handler} refused: {status} {code}"
            _logger.info("%s", line, extra={"request_id": request_id})


class RequestLog(RefusalLog):
    """Measures and traces every finished request, and logs it if the settings say so."""

    def __init__(self, settings: ServerSettings, metrics: Metrics, tracing: Tracing | None = None) -> None:
        super().__init__(settings)
        self.metrics = metrics
        self.tracing = tracing
        self._logs_prompts = settings.log_prompts

    def finish(self, seen: Observation) -> None:
        """Record a request whose last choice has ended."""
        request = seen.summary()
        extra = {"request_id": seen.request_id}
        self.metrics.finish(request)
        if self.tracing is not None:
            self.tracing.record(seen.request_id, seen.route, request, seen.began_ns, seen.trace_context)
        if self._logs_requests:
            _logger.info("%s", request_line(seen, request), extra=extra)
        if self._logs_prompts:
            for name, text in seen.texts():
                _logger.info("request %s %s: %s", seen.request_id, name, quoted(text), extra=extra)


@dataclass(slots=True)
class _Progress:
    """How far a choice has got. latest_s: time of its latest token, by the engine's clock."""

    latest_s: float
    num_tokens: int


@dataclass(slots=True, eq=False)
class Observation:
    """Follows one request, a prompt with n choices, from now on. `on_delta` must see each delta of its Generation.

    route: our word for its kind. max_tokens: None if none was set. prompt: its text, if it has one. generation: is set
    once it exists.
    A request counts as accepted from its first delta: one that never starts leaves no trace, and every choice of one
    that does start ends with a delta.
    """

    log: RequestLog
    request_id: str
    route: str
    num_prompt_tokens: int
    is_stream: bool
    n: int
    max_tokens: int | None = None
    prompt: str | None = None
    generation: Generation | None = None
    began_ns: int = field(default_factory=time.time_ns)
    trace_context: Context | None = None
    _began: float = field(default_factory=time.monotonic)
    _is_accepted: bool = False
    _first_token_s: float | None = None
    _progress: dict[int, _Progress] = field(default_factory=dict)  # of the choices that have tokens
    _reasons: dict[int, FinishReason] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log.tracing is not None:
            self.trace_context = self.log.tracing.current_context()

    def on_delta(self, delta: ChoiceDelta) -> None:
        if not self._is_accepted:
            self._is_accepted = True
            self.log.metrics.accept()
        if num_tokens := len(delta.token_ids):
            # By the engine's clock: here, deltas that arrive late arrive together.
            decode_s = 0.0 if self.generation is None else self.generation.stream.output.decode_s
            progress = self._progress.get(delta.index)
            if progress is None:
                self._begin_choice(delta.index, decode_s, num_tokens)
            else:
                self.log.metrics.inter_token.observe((decode_s - progress.latest_s) / num_tokens)
                progress.latest_s = decode_s
                progress.num_tokens += num_tokens
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
            if len(self._reasons) == self.n:
                self.log.finish(self)

    def _begin_choice(self, index: int, decode_s: float, num_tokens: int) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._began
            self.log.metrics.first_token.observe(self._first_token_s)
        self._progress[index] = _Progress(decode_s, num_tokens)

    def summary(self) -> FinishedRequest:
        """Return the measurements of a request that is over."""
        num_tokens = [one.num_tokens for one in self._progress.values()]
        request = FinishedRequest(
            reason=next(reason for reason in _WORST_FIRST if reason in self._reasons.values()),
            num_prompt_tokens=self.num_prompt_tokens,
            n=self.n,
            max_tokens=self.max_tokens,
            num_generation_tokens=sum(num_tokens),
            max_num_generation_tokens=max(num_tokens, default=0),
            finish_reasons=[self._reasons[index] for index in sorted(self._reasons)],
            e2e_s=time.monotonic() - self._began,
            first_token_s=self._first_token_s,
        )
        if self.generation is not None:
            output = self.generation.output
            request.num_generation_tokens = self.generation.stream.num_output_tokens
            request.num_cached_tokens = output.num_cached_tokens
            request.num_reasoning_tokens = sum(one.num_reasoning_tokens for one in output.outputs)
            request.queue_s, request.prefill_s, request.decode_s = output.queue_s, output.prefill_s, output.decode_s
        return request

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the prompt and the parts of the response, each with a name."""
        if self.generation is None:
            return
        output = self.generation.output
        prompt = output.prompt if self.prompt is None else self.prompt
        yield "prompt", f"tokens {output.prompt_token_ids}" if prompt is None else prompt
        for one in output.outputs:
            for part in one.parts:
                call = "" if part.call is None else f"{part.call.name} "
                yield f"{_PART_NAMES[part.kind]} {one.index}", call + part.text
            if not any(part.kind is PartKind.TEXT for part in one.parts):
                yield f"answer {one.index}", ""


def request_line(seen: Observation, request: FinishedRequest) -> str:
    """Return a line with the numbers of a request, and none of its text."""
    stream = " stream" if seen.is_stream else ""
    adapter = "" if seen.generation is None else seen.generation.adapter
    adapter = adapter and f" with {printable(adapter[:MAX_LOGGED_NAME])}"
    reasoning = f" ({request.num_reasoning_tokens} reasoning)" if request.num_reasoning_tokens else ""
    line = (
        f"request {seen.request_id} {seen.route}{stream}{adapter} {request.reason}: "
        f"{request.num_prompt_tokens} prompt tokens ({request.num_cached_tokens} cached), "
        f"{request.num_generation_tokens} generated{reasoning}, "
        f"queue {request.queue_s:.3f} s, prefill {request.prefill_s:.2f} s, decode {request.decode_s:.2f} s"
    )
    if request.decode_s > 0:
        line += f", {(request.num_generation_tokens - 1) / request.decode_s:.1f} tokens/s"
    return line


def quoted(text: str) -> str:
    """Return a Python string of at most MAX_LOGGED_CHARS characters of the text, and the text's length if it is cut."""
    cut = repr(text[:MAX_LOGGED_CHARS])
    return printable(cut) + (f"... ({len(text)} characters)" if len(text) > MAX_LOGGED_CHARS else "")
