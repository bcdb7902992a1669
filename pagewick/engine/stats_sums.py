"""Totals of an engine that was restarted: sums of EngineStats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

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
    return msgspec.structs.replace(stats, **_NOTHING)


def add_totals(past: EngineStats, present: EngineStats) -> EngineStats:
    """Return the gauges of the present engine and the totals of both."""
    totals = set(EngineStats.__struct_fields__) - set(GAUGES)
    return msgspec.structs.replace(
        present, **{name: _sum(getattr(past, name), getattr(present, name)) for name in totals}
    )


def _sum(past: Any, present: Any) -> Any:
    """Add numbers, or lists of them, of which the shorter one is padded with 0."""
    if isinstance(past, Sequence):
        longest = max(len(past), len(present))
        padded = ([*values, *[0] * (longest - len(values))] for values in (past, present))
        return [_sum(one, other) for one, other in zip(*padded, strict=True)]
    return past + present
