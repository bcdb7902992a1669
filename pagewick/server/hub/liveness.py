"""Liveness: asks an API process for a report of its counts every second, and notices that it hangs."""

from __future__ import annotations

import asyncio
import time

from pagewick.engine.watchdog import HUNG_AFTER_S, LOOK_INTERVAL_S, Watchdog, activity_of
from pagewick.log import get_logger
from pagewick.server.hub.peer import Peer

_logger = get_logger(__name__)


async def until_hung(process_id: int, peer: Peer, name: str, timeout_s: float) -> str:
    """Return how long the process has hung, in words, once that is `timeout_s` seconds; never if this is 0.

    A process whose event loop turns reports at once. One that owes a report is judged as an engine that owes work, so
    that a process that only waits for a busy machine does not count as hung. The reports also bound the loss when a
    process dies: the hub knows its counts as they were about a second ago.
    """
    hung_after_s = min(HUNG_AFTER_S, timeout_s or HUNG_AFTER_S)
    watchdog = Watchdog(
        peer.progress, lambda: activity_of([process_id]), now=time.monotonic(), hung_after_s=hung_after_s
    )
    while not watchdog.is_hung or not 0 < timeout_s <= watchdog.stalled_s:
        peer.wanted_report()
        await asyncio.sleep(LOOK_INTERVAL_S)
        was_hung = watchdog.is_hung
        watchdog.look(time.monotonic(), num_sent=0)
        if watchdog.is_hung and not was_hung:
            end = f"; at {timeout_s:.0f} it is started again" if timeout_s else ""
            _logger.error("%s has not responded for %.0f seconds%s", name, watchdog.stalled_s, end)
        elif was_hung and not watchdog.is_hung:
            _logger.warning("%s responds again", name)
    return f"did not respond for {watchdog.stalled_s:.0f} seconds"
