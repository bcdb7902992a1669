"""The engine's own counts as Prometheus metrics, read from it whenever somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import ITERATION_TOKEN_BOUNDS, EngineStats, ModelInfo

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
    ("vllm:prompt_tokens", "Prompt tokens of the requests that the engine took.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens that the engine generated.", lambda s: s.generation_tokens),
    ("vllm:spec_decode_num_draft_tokens", "Tokens that speculation guessed.", lambda s: s.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.", lambda s: s.num_accepted_tokens),
    ("pagewick:engine_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("pagewick:requests_expired", "Requests whose time was over.", lambda s: s.num_expired),
    ("pagewick:queue_refusals", "Requests that the engine refused: too many waited.", lambda s: s.num_refused),
    ("pagewick:kv_blocks_saved", "Blocks moved out of the KV cache to memory or disk.", lambda s: s.num_blocks_saved),
    ("pagewick:kv_blocks_loaded", "Blocks moved back from there.", lambda s: s.num_blocks_loaded),
    ("pagewick:expert_hits", "Experts that were on the device when a step needed them.", lambda s: s.num_expert_hits),
    ("pagewick:expert_copies", "Experts that were copied there from host memory.", lambda s: s.num_expert_copies),
    ("pagewick:expert_copy_bytes", "What these copies moved, on rank 0.", lambda s: s.expert_copy_bytes),
)


class EngineCollector(Collector):
    """The counts restart from 0 with the engine, which Prometheus' rate() and increase() take into account."""

    def __init__(
        self,
        model_name: str,
        info: ModelInfo,
        stats: Callable[[], EngineStats],
        health: Callable[[], EngineHealth],
    ) -> None:
        self._model_name = model_name
        self._info = info
        self._stats = stats
        self._health = health

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, read in _GAUGES:
            yield self._gauge(name, text, read(stats))
        usage = kv_cache_usage(stats, self._info.num_kv_blocks)
        yield self._gauge("vllm:kv_cache_usage_perc", "Referenced share of the KV cache, 1 is all.", usage)
        for name, text, read in _COUNTERS:
            yield self._counter(name, text, read(stats))
        yield self._iteration_tokens(stats)
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        config.add_metric([self._model_name, str(self._info.block_size), str(self._info.num_kv_blocks)], 1)
        yield config
        health = self._health()
        healthy = GaugeMetricFamily(
            "vllm:engine_healthy", "1 if the engine serves requests, else 0.", labels=["model_name", "engine"]
        )
        healthy.add_metric([self._model_name, "0"], health.state == "ready")
        yield healthy
        yield self._counter("pagewick:engine_restarts", "How often the engine was started anew.", health.num_restarts)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter

    def _iteration_tokens(self, stats: EngineStats) -> Metric:
        """vLLM's name ends like a counter's; it is a histogram all the same."""
        histogram = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Prompt tokens computed and tokens generated per step.",
            labels=["model_name"],
        )
        bounds = [*(str(float(bound)) for bound in ITERATION_TOKEN_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(stats.iteration_token_counts), strict=True))
        histogram.add_metric([self._model_name], buckets, sum_value=stats.num_iteration_tokens)
        return histogram


def kv_cache_usage(stats: EngineStats, num_kv_blocks: int) -> float:
    """The share that sequences hold of all blocks there may be; those that are open now can be fewer."""
    return stats.num_referenced_blocks / max(stats.num_blocks, num_kv_blocks, 1)
