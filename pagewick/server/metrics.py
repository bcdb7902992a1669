"""Prometheus metrics under vLLM's names, so that dashboards for vLLM show Pagewick too.

Labels come from the configuration alone, never from a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewick.engine.messages import EngineStats, ModelInfo
from pagewick.outputs import FinishReason
from pagewick.text.output_stream import ChoiceDelta

# Seconds. The first two follow OpenTelemetry's conventions for GenAI metrics, widened for slow machines.
_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")

_Read = Callable[[EngineStats], float]

_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:num_requests_running", "Sequences that are being generated.", lambda s: s.num_requests_running),
    ("vllm:num_requests_waiting", "Sequences that wait for their turn.", lambda s: s.num_requests_waiting),
    ("pagewick:waiting_tokens", "Tokens to compute for those that wait.", lambda s: s.num_waiting_tokens),
    ("pagewick:oldest_wait_seconds", "How long the oldest of them has waited.", lambda s: s.oldest_wait_s),
    ("pagewick:sessions", "Sessions whose blocks are kept.", lambda s: s.num_sessions),
    ("pagewick:kv_blocks", "Blocks of the KV cache.", lambda s: s.num_blocks),
    ("pagewick:kv_blocks_free", "Blocks that hold nothing.", lambda s: s.num_free_blocks),
    ("pagewick:kv_blocks_cached", "Blocks that only the prefix cache holds.", lambda s: s.num_cached_blocks),
    ("pagewick:kv_blocks_referenced", "Blocks that sequences hold.", lambda s: s.num_referenced_blocks),
    ("pagewick:kv_blocks_session", "Blocks that only sessions hold.", lambda s: s.num_session_blocks),
    ("pagewick:kv_blocks_host", "Blocks in host memory.", lambda s: s.num_host_blocks),
    ("pagewick:kv_blocks_disk", "Blocks on disk.", lambda s: s.num_disk_blocks),
    ("pagewick:kv_blocks_leaked", "Blocks nobody accounts for: not 0 is a bug.", lambda s: s.num_leaked_blocks),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    ("vllm:num_preemptions", "Sequences sent back to wait for memory.", lambda s: s.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens of all requests.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda s: s.generation_tokens),
    ("vllm:spec_decode_num_draft_tokens", "Tokens that speculation guessed.", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.", lambda s: s.num_accepted_tokens),
    ("pagewick:engine_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("pagewick:requests_expired", "Requests whose time was over.", lambda s: s.num_expired),
    ("pagewick:requests_refused", "Requests refused because too many waited.", lambda s: s.num_refused),
    ("pagewick:kv_blocks_saved", "Blocks moved out of the KV cache to memory or disk.", lambda s: s.num_blocks_saved),
    ("pagewick:kv_blocks_loaded", "Blocks moved back from there.", lambda s: s.num_blocks_loaded),
)


class Metrics:
    """What the server measures, and the engine's counts as of the latest scrape."""

    def __init__(self, model_name: str, info: ModelInfo, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, info, stats))
        self.first_token = self._seconds("time_to_first_token", "until the first token", _FIRST_TOKEN_BUCKETS)
        self.inter_token = self._seconds("inter_token_latency", "between two tokens", _TOKEN_BUCKETS)
        self.request = self._seconds("e2e_request_latency", "for a whole answer", _REQUEST_BUCKETS)
        finished = Counter(
            "vllm:request_success", "Finished sequences.", ["model_name", "finished_reason"], registry=self._registry
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in _FINISH_REASONS}

    def observer(self) -> Callable[[ChoiceDelta], None]:
        """Measures one request, beginning now; to be called with each of its deltas."""
        return _Stopwatch(self).observe

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _seconds(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}_seconds", f"Seconds {what}.", ["model_name"], buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model_name)


class _Stopwatch:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._latest: dict[int, float] = {}

    def observe(self, delta: ChoiceDelta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            if delta.index in self._latest:
                self._metrics.inter_token.observe((now - self._latest[delta.index]) / len(delta.token_ids))
            else:
                self._metrics.first_token.observe(now - self._start)
            self._latest[delta.index] = now
        if delta.finish_reason is not None:
            self._metrics.finished[delta.finish_reason].inc()
            self._metrics.request.observe(now - self._start)


class _EngineCollector(Collector):
    """Reads the engine's counts when Prometheus asks."""

    def __init__(self, model_name: str, info: ModelInfo, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._info = info
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        usage = ("vllm:kv_cache_usage_perc", "Referenced share of the KV cache, 1 is all.", self._usage)
        for name, text, read in (*_GAUGES, usage):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], read(stats))
            yield counter
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        config.add_metric([self._model_name, str(self._info.block_size), str(self._info.num_kv_blocks)], 1)
        yield config

    def _usage(self, stats: EngineStats) -> float:
        """Of all blocks there may be; those that are open now can be fewer."""
        return stats.num_referenced_blocks / max(stats.num_blocks, self._info.num_kv_blocks, 1)
