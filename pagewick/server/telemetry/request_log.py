"""RequestLog: what becomes of every request, for the log, the metrics and the traces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagewick.generation import Generation
from pagewick.log import get_logger, printable
from pagewick.outputs import FinishReason, PartKind
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.metrics import FinishedRequest, Metrics
from pagewick.text.output_stream import ChoiceDelta

if TYPE_CHECKING:
    from pagewick.server.telemetry.tracing import Tracing

# Of a prompt or an answer, with --log-prompts.
MAX_LOGGED_CHARS = 2000
# A request with several choices ends as the worst of them does.
_WORST_FIRST: tuple[FinishReason, ...] = ("error", "abort", "length", "stop")

_PART_NAMES = {
    PartKind.TEXT: "answer",
    PartKind.REASONING: "thoughts",
    PartKind.TOOL_CALL: "tool call",
    PartKind.REFUSAL: "refusal",
}

_logger = get_logger(__name__)


class RequestLog:
    """One line per finished request, if the settings want it, and its part in the metrics and the traces, always."""

    def __init__(self, settings: ServerSettings, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self._logs_requests = settings.log_requests
        self._logs_prompts = settings.log_prompts

    def begin(
        self,
        request_id: str,
        route: str,
        num_prompt_tokens: int,
        stream: bool,
        n: int,
        *,
        max_tokens: int | None = None,
        prompt: str | None = None,
    ) -> Observation:
        """Follow a request that begins now, which is a prompt with its n choices.

        route: what it was, in a word of ours. max_tokens: None if none was set. prompt: its text, if it has one.
        """
        return Observation(self, request_id, route, num_prompt_tokens, stream, n, max_tokens, prompt)

    def finish(self, seen: Observation) -> None:
        """The last of a request's choices has ended."""
        request = seen.summary()
        self.metrics.finish(request)
        if self.tracing is not None:
            self.tracing.record(seen.request_id, seen.route, request, seen.began_ns, seen.trace_context)
        if self._logs_requests:
            _logger.info("%s", request_line(seen, request), extra={"request_id": seen.request_id})
        if self._logs_prompts:
            for what, text in seen.texts():
                _logger.info(
                    "request %s %s: %s", seen.request_id, what, quoted(text), extra={"request_id": seen.request_id}
                )

    def refused(self, request_id: str, method: str, handler: str, status: int, code: str) -> None:
        """A request was answered with an error. Nothing of the client's gets here but the id, which was checked."""
        if self._logs_requests:
            line = f"request {request_id} {method} {handler} refused: {status} {code}"
            _logger.info("%s", line, extra={"request_id": request_id})


class Observation:
    """Sees a request's deltas. `on_delta` is for AsyncEngine.request, whose result is to be attached.

    A request counts as accepted from the first that is heard of it: one that is never started leaves no trace, and of
    each that is, the end of every choice is heard.
    """

    def __init__(
        self,
        log: RequestLog,
        request_id: str,
        route: str,
        num_prompt_tokens: int,
        is_stream: bool,
        n: int,
        max_tokens: int | None,
        prompt: str | None,
    ) -> None:
        self.request_id = request_id
        self.route = route
        self.is_stream = is_stream
        self.began_ns = time.time_ns()
        self.trace_context = log.tracing.current_context() if log.tracing is not None else None
        self._log = log
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._max_tokens = max_tokens
        self._prompt = prompt
        self._began = time.monotonic()
        self._is_accepted = False
        self._first_token_at: float | None = None
        self._latest: dict[int, float] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._num_tokens: dict[int, int] = {}
        self._generation: Generation | None = None

    def attach(self, generation: Generation) -> None:
        """What came of the request: its texts, and what the engine says of it."""
        self._generation = generation

    def on_delta(self, delta: ChoiceDelta) -> None:
        metrics = self._log.metrics
        if not self._is_accepted:
            self._is_accepted = True
            metrics.accept()
        if delta.token_ids:
            now = time.monotonic()
            if self._first_token_at is None:
                self._first_token_at = now
                metrics.first_token.observe(now - self._began)
            if delta.index in self._latest:
                metrics.inter_token.observe((now - self._latest[delta.index]) / len(delta.token_ids))
            self._latest[delta.index] = now
            self._num_tokens[delta.index] = self._num_tokens.get(delta.index, 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
            if len(self._reasons) == self._n:
                self._log.finish(self)

    def summary(self) -> FinishedRequest:
        """Of a request that is over."""
        num_tokens = self._num_tokens.values()
        first = self._first_token_at
        request = FinishedRequest(
            reason=next(reason for reason in _WORST_FIRST if reason in self._reasons.values()),
            num_prompt_tokens=self._num_prompt_tokens,
            n=self._n,
            max_tokens=self._max_tokens,
            num_generation_tokens=sum(num_tokens),
            max_num_generation_tokens=max(num_tokens, default=0),
            finish_reasons=[self._reasons[index] for index in sorted(self._reasons)],
            e2e_s=time.monotonic() - self._began,
            first_token_s=None if first is None else first - self._began,
            decode_s=0.0 if first is None else max(self._latest.values()) - first,
        )
        if self._generation is not None:
            output = self._generation.output
            request.num_generation_tokens = self._generation.stream.num_output_tokens
            request.num_cached_tokens = output.num_cached_tokens
            request.num_reasoning_tokens = sum(one.num_reasoning_tokens for one in output.outputs)
            request.queue_s, request.prefill_s = output.queue_s, output.prefill_s
        return request

    def texts(self) -> Iterator[tuple[str, str]]:
        """What was asked and what was answered, each with a name."""
        if self._generation is None:
            return
        output = self._generation.output
        prompt = output.prompt if self._prompt is None else self._prompt
        yield "prompt", f"tokens {output.prompt_token_ids}" if prompt is None else prompt
        for one in output.outputs:
            for part in one.parts:
                call = "" if part.call is None else f"{part.call.name} "
                yield f"{_PART_NAMES[part.kind]} {one.index}", call + part.text
            if not any(part.kind is PartKind.TEXT for part in one.parts):
                yield f"answer {one.index}", ""


def request_line(seen: Observation, request: FinishedRequest) -> str:
    """What was asked and what came of it, in numbers."""
    stream = " stream" if seen.is_stream else ""
    reasoning = f" ({request.num_reasoning_tokens} reasoning)" if request.num_reasoning_tokens else ""
    line = (
        f"request {seen.request_id} {seen.route}{stream} {request.reason}: {request.num_prompt_tokens} prompt tokens "
        f"({request.num_cached_tokens} cached), {request.num_generation_tokens} generated{reasoning}, "
        f"queue {request.queue_s:.3f} s, prefill {request.prefill_s:.2f} s, decode {request.decode_s:.2f} s"
    )
    if request.decode_s > 0:
        line += f", {request.num_generation_tokens / request.decode_s:.1f} tokens/s"
    return line


def quoted(text: str) -> str:
    """As a Python string of at most MAX_LOGGED_CHARS characters of the text, and how many there are if more."""
    cut = repr(text[:MAX_LOGGED_CHARS])
    return printable(cut) + (f"... ({len(text)} characters)" if len(text) > MAX_LOGGED_CHARS else "")
