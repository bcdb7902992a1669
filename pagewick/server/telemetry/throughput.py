"""A regular line in the log about throughput, in vLLM's words, which people search logs for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pagewick.engine.messages import EngineStats, ModelInfo
from pagewick.log import get_logger
from pagewick.server.telemetry.engine_metrics import kv_cache_usage

INTERVAL_S = 10.0

_logger = get_logger(__name__)


async def report_throughput(stats: Callable[[], EngineStats], info: ModelInfo, interval_s: float = INTERVAL_S) -> None:
    """Log a line every `interval_s` seconds in which something happened; runs until it is cancelled."""
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
