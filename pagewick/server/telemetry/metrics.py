"""Prometheus metrics under vLLM's names, so that dashboards for vLLM show Pagewick too.

Labels come from the configuration, from the route table and from lists in this package alone, never from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineStats, ModelInfo
from pagewick.outputs import FinishReason
from pagewick.server.telemetry.engine_metrics import EngineCollector

# Seconds; vLLM's bounds, with finer ones below for small models.
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
# Why a request was answered with an error. The codes of errors, as far as they name a cause of their own; ...
_REFUSAL_CODES = {
    "context_length_exceeded": "context_length",
    "unsupported_parameter": "unsupported",
    "queue_full": "queue_full",
    "draining": "draining",
    "loading": "loading",
    "engine_dead": "engine",
    "deadline_exceeded": "deadline",
}
# ... else the status says it; 4xx and 5xx stand for those that are not listed.
_REFUSAL_STATUSES = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "not_found",
    408: "timeout",
    413: "too_large",
    415: "invalid_request",
    421: "forbidden",
    422: "invalid_request",
    429: "rate_limit",
    431: "too_large",
    503: "unavailable",
    504: "deadline",
}
_REFUSALS = sorted({*_REFUSAL_CODES.values(), *_REFUSAL_STATUSES.values(), "invalid_request", "internal"})


@dataclass(slots=True)
class FinishedRequest:
    """What is measured of one request, all its choices together, when the last of them has ended.

    max_tokens: None if the request set none. num_generation_tokens: of all choices, those that best_of has dropped
    included; max_num_generation_tokens: of the longest. finish_reasons: of each choice; reason: of the worst.
    Times are seconds: e2e_s and first_token_s from the request's first sight to its end and its first token, queue_s
    until it was scheduled, prefill_s from there to the first token, decode_s from there to the last.
    """

    reason: FinishReason
    num_prompt_tokens: int
    n: int
    max_tokens: int | None = None
    num_generation_tokens: int = 0
    max_num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    finish_reasons: Sequence[FinishReason] = ()
    e2e_s: float = 0.0
    first_token_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether its prompt has been computed."""
        return self.num_generation_tokens > 0 or self.reason in ("stop", "length")


class Metrics:
    """What the server measures, and the engine's counts as of the latest scrape."""

    def __init__(
        self,
        model_name: str,
        info: ModelInfo,
        stats: Callable[[], EngineStats],
        health: Callable[[], EngineHealth] = lambda: EngineHealth("ready"),
    ) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model_name, info, stats, health))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._make_request_metrics(_one_two_five(info.max_model_len))
        self._make_http_metrics()

    def accept(self) -> None:
        """The engine has been given a request."""
        self._accepted.inc()

    def finish(self, request: FinishedRequest) -> None:
        """A request that was accepted is over."""
        self._finished[request.reason].inc()
        self._prompt_tokens.observe(request.num_prompt_tokens)
        self._generation_tokens.observe(request.num_generation_tokens)
        self._max_num_generation_tokens.observe(request.max_num_generation_tokens)
        self._params_n.observe(request.n)
        if request.max_tokens is not None:
            self._params_max_tokens.observe(request.max_tokens)
        self._e2e.observe(request.e2e_s)
        self._queue.observe(request.queue_s)
        if request.has_begun:
            self._prefill.observe(request.prefill_s)
            self._decode.observe(request.decode_s)
            self._inference.observe(request.prefill_s + request.decode_s)
        if request.max_num_generation_tokens > 1:
            self._time_per_output_token.observe(request.decode_s / (request.max_num_generation_tokens - 1))

    def refuse(self, status: int, code: str | None) -> str:
        """A request was answered with an error; why, in one word of a list."""
        reason = _REFUSAL_CODES.get(code or "") or _REFUSAL_STATUSES.get(status)
        reason = reason or ("internal" if status >= 500 else "invalid_request")
        self._refused[reason].inc()
        return reason

    def answer(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP request is over. method and handler must be of lists, not what the client wrote."""
        self._http_requests.labels(method, handler, str(status)).inc()
        self._http_duration.labels(method, handler).observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _make_request_metrics(self, token_buckets: Sequence[float]) -> None:
        seconds, tokens = self._seconds, self._histogram
        self._accepted = self._counter("pagewick:requests_accepted", "Requests that were given to the engine.")
        finished = self._labelled_counter("vllm:request_success", "Accepted requests that are over.", "finished_reason")
        self._finished = {reason: finished.labels(self._model_name, reason) for reason in FINISH_REASONS}
        refused = self._labelled_counter("pagewick:requests_refused", "Requests answered with an error.", "reason")
        self._refused = {reason: refused.labels(self._model_name, reason) for reason in _REFUSALS}
        self.first_token = seconds("time_to_first_token", "Until the first token.", _FIRST_TOKEN_BUCKETS)
        latencies = self._family("inter_token_latency_seconds", "Between two tokens.", _TOKEN_BUCKETS)
        self._registry.register(_Renamed(latencies, "vllm:time_per_output_token_seconds"))
        self.inter_token = latencies.labels(self._model_name)
        text = "Between two tokens, as a request's mean."
        self._time_per_output_token = seconds("request_time_per_output_token", text, _TOKEN_BUCKETS)
        self._e2e = seconds("e2e_request_latency", "For a whole request.", _REQUEST_BUCKETS)
        self._queue = seconds("request_queue_time", "Until it was scheduled.", _REQUEST_BUCKETS)
        self._prefill = seconds("request_prefill_time", "From there to the first token.", _REQUEST_BUCKETS)
        self._decode = seconds("request_decode_time", "From there to the last token.", _REQUEST_BUCKETS)
        self._inference = seconds("request_inference_time", "Prefill and decode.", _REQUEST_BUCKETS)
        self._prompt_tokens = tokens("request_prompt_tokens", "Tokens of its prompt.", token_buckets)
        self._generation_tokens = tokens("request_generation_tokens", "Tokens of all choices.", token_buckets)
        text = "Tokens of its longest choice."
        self._max_num_generation_tokens = tokens("request_max_num_generation_tokens", text, token_buckets)
        self._params_n = tokens("request_params_n", "Choices asked for.", _N_BUCKETS)
        self._params_max_tokens = tokens("request_params_max_tokens", "max_tokens, where set.", token_buckets)

    def _make_http_metrics(self) -> None:
        self._http_requests = Counter(
            "http_requests", "HTTP requests answered.", ["method", "handler", "status"], registry=self._registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Seconds until the last byte of the answer.",
            ["method", "handler"],
            buckets=_HTTP_BUCKETS,
            registry=self._registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model_name)

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, ["model_name", label], registry=self._registry)

    def _seconds(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._histogram(f"{name}_seconds", text, buckets)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._family(name, text, buckets).labels(self._model_name)

    def _family(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)


class _Renamed(Collector):
    """The same numbers under the name by which older dashboards ask for them."""

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram = histogram
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for metric in self._histogram.collect():
            renamed = Metric(self._name, metric.documentation, metric.type)
            renamed.samples = [
                sample._replace(name=sample.name.replace(metric.name, self._name)) for sample in metric.samples
            ]
            yield renamed


def _one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to the context's length; vLLM's bounds for counts of tokens."""
    bounds: list[float] = []
    power = 1
    while power <= largest:
        bounds += [factor * power for factor in (1, 2, 5) if factor * power <= largest]
        power *= 10
    return bounds
