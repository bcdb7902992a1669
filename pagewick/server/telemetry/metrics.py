"""Prometheus metrics under vLLM's names, so that dashboards for vLLM show Pagewick too.

Labels come from the configuration, the route table and lists in this package, never from a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineStats
from pagewick.engine.model_info import ModelInfo
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

# The counts of requests, which balance: each accepted one ends for one reason.
HTTP_REQUESTS, HTTP_DURATION = "http_requests", "http_request_duration_seconds"
ACCEPTED, FINISHED, REASON = "pagewick:requests_accepted", "vllm:request_success", "finished_reason"
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
# Why a request was answered with an error: by the error's code, if it names a cause of its own, ...
_REFUSAL_CODES = {
    "context_length_exceeded": "context_length",
    "unsupported_parameter": "unsupported",
    "queue_full": "queue_full",
    "draining": "draining",
    "loading": "loading",
    "engine_dead": "engine",
    "deadline_exceeded": "deadline",
}
# ... else by its status. Any other status is "invalid_request" or "internal".
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
    529: "unavailable",
}
_REFUSALS = sorted({*_REFUSAL_CODES.values(), *_REFUSAL_STATUSES.values(), "invalid_request", "internal"})


@dataclass(slots=True)
class FinishedRequest:
    """Measurements of one request, all its choices together, from when the last of them has ended.

    max_tokens: None if the request set none. num_generation_tokens: tokens of all choices, also of those that best_of
    has dropped; max_num_generation_tokens: tokens of the longest. finish_reasons: one per choice; reason: the worst.
    Times are seconds: e2e_s and first_token_s from the arrival of the request to its end and its first token, queue_s
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

    @property
    def time_per_output_token_s(self) -> float | None:
        num_intervals = self.max_num_generation_tokens - 1
        return self.decode_s / num_intervals if num_intervals > 0 else None


_Read = Callable[[FinishedRequest], float | None]
# Histograms of finished requests: name, help, buckets (None: counts of tokens), and the value, or None for no value.
_REQUEST_HISTOGRAMS: tuple[tuple[str, str, Sequence[float] | None, _Read], ...] = (
    ("request_prompt_tokens", "Prompt tokens of a request.", None, lambda r: r.num_prompt_tokens),
    ("request_generation_tokens", "Tokens of all choices of a request.", None, lambda r: r.num_generation_tokens),
    (
        "request_max_num_generation_tokens", "Tokens of the longest choice of a request.", None,
        lambda r: r.max_num_generation_tokens,
    ),
    ("request_params_n", "Number of choices of a request.", _N_BUCKETS, lambda r: r.n),
    ("request_params_max_tokens", "max_tokens of requests that set it.", None, lambda r: r.max_tokens),
    (
        "request_time_per_output_token_seconds", "Mean seconds between two tokens of a request.", _TOKEN_BUCKETS,
        lambda r: r.time_per_output_token_s,
    ),
    ("e2e_request_latency_seconds", "Seconds from arrival to the end.", _REQUEST_BUCKETS, lambda r: r.e2e_s),
    ("request_queue_time_seconds", "Seconds from arrival to scheduling.", _REQUEST_BUCKETS, lambda r: r.queue_s),
    (
        "request_prefill_time_seconds", "Seconds from scheduling to the first token.", _REQUEST_BUCKETS,
        lambda r: r.prefill_s if r.has_begun else None,
    ),
    (
        "request_decode_time_seconds", "Seconds from the first to the last token.", _REQUEST_BUCKETS,
        lambda r: r.decode_s if r.has_begun else None,
    ),
    (
        "request_inference_time_seconds", "Seconds of prefill and decode together.", _REQUEST_BUCKETS,
        lambda r: r.prefill_s + r.decode_s if r.has_begun else None,
    ),
)  # fmt: skip


def process_registry() -> CollectorRegistry:
    """Return a registry with the metrics of this process: its memory, its processor time and the like."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class HttpCounts:
    """Counts of HTTP requests. model_name: the label of those that were refused. registry: gets all metrics."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._registry = registry
        text = "Requests answered with an error."
        self._refused = self._counters("pagewick:requests_refused", text, "reason", _REFUSALS)
        labels = ["method", "handler", "status"]
        self._http_requests = Counter(HTTP_REQUESTS, "Completed HTTP requests.", labels, registry=registry)
        self._http_duration = Histogram(
            HTTP_DURATION,
            "Seconds until the last byte of the response.",
            ["method", "handler"],
            buckets=_HTTP_BUCKETS,
            registry=registry,
        )

    def refuse(self, status: int, code: str | None) -> str:
        """Count a request that was answered with an error. Returns the reason, which is one of a fixed list."""
        reason = _REFUSAL_CODES.get(code or "") or _REFUSAL_STATUSES.get(status)
        reason = reason or ("internal" if status >= 500 else "invalid_request")
        self._refused[reason].inc()
        return reason

    def respond(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an HTTP request that is over. method and handler must be of fixed lists, not what the client wrote."""
        self._http_requests.labels(method, handler, str(status)).inc()
        self._http_duration.labels(method, handler).observe(seconds)

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    def _counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        counter = Counter(name, text, ["model_name", label], registry=self._registry)
        return {value: counter.labels(self._model_name, value) for value in values}


class Metrics(HttpCounts):
    """The server's own measurements, and the engine's counts as of the latest scrape.

    stats: None if another process has the engine's counts. registry: gets all metrics; None: a new one.
    """

    def __init__(
        self,
        model_name: str,
        info: ModelInfo,
        stats: Callable[[], EngineStats] | None = None,
        health: Callable[[], EngineHealth] = lambda: EngineHealth("ready"),
        registry: CollectorRegistry | None = None,
    ) -> None:
        registry = registry or process_registry()
        super().__init__(model_name, registry)
        if stats is not None:
            registry.register(EngineCollector(model_name, info, stats, health))
        text = "Requests sent to the engine."
        accepted = Counter(ACCEPTED, text, ["model_name"], registry=registry)
        self._accepted = accepted.labels(model_name)
        text = "Accepted requests that have ended."
        self._finished = self._counters(FINISHED, text, REASON, FINISH_REASONS)
        text, buckets = "Seconds from arrival to the first token.", _FIRST_TOKEN_BUCKETS
        self.first_token = self._histogram("time_to_first_token_seconds", text, buckets).labels(model_name)
        self.inter_token = _TokenLatencies(model_name)
        registry.register(self.inter_token)
        token_buckets = _one_two_five(info.max_model_len)
        self._request_histograms = [
            (self._histogram(name, text, buckets or token_buckets).labels(model_name), read)
            for name, text, buckets, read in _REQUEST_HISTOGRAMS
        ]

    def accept(self) -> None:
        """Count a request that was given to the engine."""
        self._accepted.inc()

    def finish(self, request: FinishedRequest) -> None:
        """Count and measure an accepted request that is over."""
        self._finished[request.reason].inc()
        for histogram, read in self._request_histograms:
            if (value := read(request)) is not None:
                histogram.observe(value)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)


class _TokenLatencies(Collector):
    """A histogram under two names, the second one for older dashboards. It has no lock, to be fast for each token."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(_TOKEN_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_TOKEN_BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in _TOKEN_BUCKETS), "+Inf"]
        for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
            histogram = HistogramMetricFamily(name, "Seconds between two tokens.", labels=["model_name"])
            buckets = list(zip(bounds, accumulate(self._counts), strict=True))
            histogram.add_metric([self._model_name], buckets, sum_value=self._sum)
            yield histogram


def _one_two_five(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to the context's length, which are vLLM's bounds for counts of tokens."""
    powers = [10**digits for digits in range(len(str(largest)))]
    return [bound for power in powers for bound in (power, 2 * power, 5 * power) if bound <= largest]
