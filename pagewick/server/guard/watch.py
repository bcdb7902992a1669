"""Watch: looks at all connections at intervals, so that thousands of them need no timers and no tasks."""

from __future__ import annotations

import asyncio
from typing import Protocol

from pagewick.log import get_logger
from pagewick.server.settings import ServerSettings
from pagewick.server.tally import Tally

LOOK_S = 1.0

_logger = get_logger(__name__)


class Watched(Protocol):
    """A connection."""

    loop: asyncio.AbstractEventLoop

    def look(self, now: float) -> None:
        """End the connection if something lasts too long; `now` is the watch's time."""


class Watch:
    """The connections of one process. It looks at them every second, or four times within the shortest limit.

    Its clock stands still while this process does not run, because what clients sent meanwhile is still to be read.
    tally: the number of connections of the server.
    """

    def __init__(self, settings: ServerSettings, tally: Tally) -> None:
        times = (settings.header_timeout, settings.body_timeout, settings.write_timeout, settings.keep_alive_timeout)
        self._interval_s = min(LOOK_S, min(times) / 4)
        self._max_connections = settings.max_connections
        self._connections: set[Watched] = set()
        self.tally = tally
        self._is_waiting = False
        self._due = 0.0  # time of the next look, on the loop's clock
        self._lost_s = 0.0  # seconds for which the clock stood still
        self.num_turned_away = 0  # connections since the last look

    def time(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return the time in seconds on the watch's own clock, which is that of `look`."""
        return loop.time() - self._lost_s

    def add(self, connection: Watched) -> None:
        self._connections.add(connection)
        self.tally.add(1)
        self._wait(connection.loop)

    def remove(self, connection: Watched) -> None:
        self._connections.remove(connection)
        self.tally.add(-1)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._due = loop.time() + self._interval_s
            loop.call_later(self._interval_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_waiting = False
        late_s = loop.time() - self._due
        if late_s > self._interval_s:
            self._lost_s += late_s
        now = self.time(loop)
        for connection in list(self._connections):
            connection.look(now)
        if self.num_turned_away:
            message = "all %d connections are in use; %d more were turned away (--max-connections)"
            _logger.warning(message, self._max_connections, self.num_turned_away)
            self.num_turned_away = 0
        if self._connections:
            self._wait(loop)
