"""The engine's own counts: as Prometheus metrics, read at every scrape, and as a regular line in the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import ITERATION_TOKEN_BOUNDS, EngineStats
from pagewick.engine.model_info import ModelInfo
from pagewick.log import get_logger

# Seconds between two lines about throughput.
INTERVAL_S = 10.0

_logger = get_logger(__name__)

# Fields of EngineStats, each with its metric's name and help.
_GAUGES = {
    "num_requests_running": ("vllm:num_requests_running", "Sequences that are being generated."),
    "num_requests_waiting": ("vllm:num_requests_waiting", "Sequences waiting in the queue."),
    "num_waiting_tokens": ("pagewick:waiting_tokens", "Tokens to compute for waiting sequences."),
    "oldest_wait_s": ("pagewick:oldest_wait_seconds", "How long the oldest waiting sequence has waited."),
    "num_sessions": ("pagewick:sessions", "Sessions whose blocks are kept."),
    "num_blocks": ("pagewick:kv_blocks", "Blocks of the KV cache."),
    "num_free_blocks": ("pagewick:kv_blocks_free", "Blocks that hold nothing."),
    "num_cached_blocks": ("pagewick:kv_blocks_cached", "Blocks that only the prefix cache holds."),
    "num_referenced_blocks": ("pagewick:kv_blocks_referenced", "Blocks that sequences hold."),
    "num_session_blocks": ("pagewick:kv_blocks_session", "Blocks that only sessions hold."),
    "num_host_blocks": ("pagewick:kv_blocks_host", "Blocks in host memory."),
    "num_disk_blocks": ("pagewick:kv_blocks_disk", "Blocks on disk."),
    "num_leaked_blocks": ("pagewick:kv_blocks_leaked", "Blocks without an owner: any value but 0 is a bug."),
}
_COUNTERS = {
    "prefix_cache_queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("vllm:num_preemptions", "Sequences preempted because memory ran out."),
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of the requests that the engine took."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens that the engine generated."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were proposed."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    "num_steps": ("pagewick:engine_steps", "Steps of the engine."),
    "num_expired": ("pagewick:requests_expired", "Requests that exceeded their timeout."),
    "num_refused": ("pagewick:queue_refusals", "Requests refused because the queue was full."),
    "num_blocks_saved": ("pagewick:kv_blocks_saved", "Blocks moved out of the KV cache to memory or disk."),
    "num_blocks_loaded": ("pagewick:kv_blocks_loaded", "Blocks moved back to the KV cache."),
    "num_constrained_requests": ("pagewick:constrained_requests", "Requests with a grammar or a limit of thoughts."),
    "num_compiled_grammars": ("pagewick:grammars_compiled", "Grammars that were compiled."),
    "grammar_compile_s": ("pagewick:grammar_compile_seconds", "Time for compiling grammars."),
    "num_grammar_masks": ("pagewick:grammar_masks", "Tokens for which a grammar's mask was computed."),
    "grammar_mask_s": ("pagewick:grammar_mask_seconds", "Time for computing masks."),
    "num_grammar_violations": ("pagewick:grammar_violations", "Tokens against a grammar: any but 0 is a bug."),
    "num_expert_hits": ("pagewick:expert_hits", "Experts that were on the device when a step needed them."),
    "num_expert_copies": ("pagewick:expert_copies", "Experts that were copied from host memory."),
    "expert_copy_bytes": ("pagewick:expert_copy_bytes", "Bytes of the experts that were copied, on rank 0."),
}


class EngineCollector(Collector):
    """The metrics of the engine. Its counts go on when it is restarted: the supervisor adds them up."""

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
        stats, info, health = self._stats(), self._info, self._health()
        for field, (name, text) in _GAUGES.items():
            yield self._gauge(name, text, getattr(stats, field))
        usage = kv_cache_usage(stats, info.num_kv_blocks)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that sequences hold, from 0 to 1.", usage)
        for field, (name, text) in _COUNTERS.items():
            yield self._counter(name, text, getattr(stats, field))
        yield self._iteration_tokens(stats)
        sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_kv_blocks)}
        yield self._gauge("vllm:cache_config_info", "The KV cache.", 1, sizes)
        text = "1 if the engine serves requests, else 0."
        yield self._gauge("vllm:engine_healthy", text, health.state == "ready", {"engine": "0"})
        yield self._counter("pagewick:engine_restarts", "Number of engine restarts.", health.num_restarts)

    def _gauge(self, name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
        labels = {"model_name": self._model_name, **(labels or {})}
        gauge = GaugeMetricFamily(name, text, labels=[*labels])
        gauge.add_metric([*labels.values()], value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter

    def _iteration_tokens(self, stats: EngineStats) -> Metric:
        """Return a histogram, although vLLM's name ends like a counter's."""
        text = "Prompt tokens computed and tokens generated per step."
        histogram = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in ITERATION_TOKEN_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(stats.iteration_token_counts), strict=True))
        histogram.add_metric([self._model_name], buckets, sum_value=stats.num_iteration_tokens)
        return histogram


def kv_cache_usage(stats: EngineStats, num_kv_blocks: int) -> float:
    """Return the share of blocks that sequences hold, of all that can be opened; fewer may be open now."""
    return stats.num_referenced_blocks / max(stats.num_blocks, num_kv_blocks, 1)


async def report_throughput(stats: Callable[[], EngineStats], info: ModelInfo, interval_s: float = INTERVAL_S) -> None:
    """Log a line every `interval_s` seconds in which something happened, until this is cancelled.

    It has vLLM's words, which people search logs for.
    """
    before, began = _counts(stats()), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now, latest = time.monotonic(), stats()
        counts = _counts(latest)
        if counts != before or latest.num_requests_running + latest.num_requests_waiting > 0:
            _logger.info("%s", throughput_line(before, latest, now - began, info))
        before, began = counts, now


def throughput_line(before: tuple[int, int], stats: EngineStats, seconds: float, info: ModelInfo) -> str:
    """before: prompt and generated tokens `seconds` ago, which are more than now if the engine has restarted."""
    counts = _counts(stats)
    prompt, generated = (new - old if new >= old else new for new, old in zip(counts, before, strict=True))
    hit_rate = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
    line = (
        f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {stats.num_requests_running} reqs, Waiting: {stats.num_requests_waiting} reqs, "
        f"{'' if info.device == 'cpu' else 'GPU '}KV cache usage: {kv_cache_usage(stats, info.num_kv_blocks):.1%}, "
        f"Prefix cache hit rate: {hit_rate:.1%}"
    )
    if needed := stats.num_expert_hits + stats.num_expert_copies:
        line += f", Expert hit rate: {stats.num_expert_hits / needed:.1%}"
    return line


def _counts(stats: EngineStats) -> tuple[int, int]:
    return stats.prompt_tokens, stats.generation_tokens
