"""Adds up the statistics of all engines of a server, so that totals never fall when an engine dies. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from pagewick.engine.messages import EngineStats

# These describe the present state of an engine; the other fields of EngineStats are totals.
GAUGES = (
    "num_requests_running", "num_requests_waiting", "num_waiting_tokens", "oldest_wait_s", "num_blocks",
    "num_free_blocks", "num_cached_blocks", "num_referenced_blocks", "num_session_blocks", "num_host_blocks",
    "num_disk_blocks", "num_leaked_blocks", "num_sessions",
)  # fmt: skip
_NOTHING = {name: getattr(EngineStats(), name) for name in GAUGES}


def without_gauges(stats: EngineStats) -> EngineStats:
    """Return the stats of an engine that is gone: its totals only."""
    return structs.replace(stats, **_NOTHING)


def add_totals(past: EngineStats, present: EngineStats) -> EngineStats:
    """Return the gauges of the present engine and the totals of both."""
    totals = set(EngineStats.__struct_fields__) - set(GAUGES)
    return structs.replace(present, **{name: _sum(getattr(past, name), getattr(present, name)) for name in totals})


def _sum(past: Any, present: Any) -> Any:
    """Add numbers, or lists (the shorter one is padded with 0) or dictionaries of them."""
    if isinstance(past, Mapping):
        return {key: _sum(past.get(key, 0), present.get(key, 0)) for key in {**past, **present}}
    if isinstance(past, Sequence):
        longest = max(len(past), len(present))
        padded = ([*values, *[0] * (longest - len(values))] for values in (past, present))
        return [_sum(one, other) for one, other in zip(*padded, strict=True)]
    return past + present
