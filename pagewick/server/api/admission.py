"""Admission: refuses requests that the engine would refuse, or that are too many at once, before any work on them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from pagewick.async_llm import AsyncEngine
from pagewick.errors import QueueFullError
from pagewick.server.api.sse import run_while_connected
from pagewick.server.core.limits import MAX_TEXT_JOBS
from pagewick.server.tally import Tally

_Result = TypeVar("_Result")

# More than a step has, so that there is always a next one.
MAX_AT_ONCE = 256


class Admission:
    """The requests of one server whose texts are being read.

    max_waiting_requests: the engine's limit, which has the last word; None: it has none. text_jobs: counts the requests
    whose texts are being read; None: no other process reads any.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        max_waiting_requests: int | None = None,
        *,
        text_jobs: Tally | None = None,
        max_text_jobs: int = MAX_TEXT_JOBS,
    ) -> None:
        self._engine = engine
        self._max_waiting = max_waiting_requests
        self._max_jobs = max_text_jobs
        self._jobs = text_jobs or Tally()

    @property
    def num_at_once(self) -> int:
        """How many of a request's prompts the engine should have at the same time, so that there is room for others."""
        return MAX_AT_ONCE if self._max_waiting is None else max(1, min(MAX_AT_ONCE, self._max_waiting // 2))

    def check_queue(self) -> None:
        """Raises QueueFullError if the engine would refuse any further request."""
        num_waiting = self._engine.stats.num_requests_waiting
        # These include preempted sequences, which the engine's limit does not count.
        if self._max_waiting is not None and num_waiting >= self._max_waiting + self._engine.info.max_num_seqs:
            message = (
                f"the server is busy: {num_waiting} requests wait already, and --max-waiting-requests is "
                f"{self._max_waiting}; retry in 1 s"
            )
            raise QueueFullError(message)

    async def run(self, request: Request, start: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Return the result of work on texts.

        Raises QueueFullError if too many texts are being read. If the client leaves first, cancels the work and raises
        ClientDisconnect.
        """
        if (num_jobs := self._jobs.total) >= self._max_jobs:
            raise QueueFullError(f"the server is busy: it is reading the texts of {num_jobs} requests; retry in 1 s")
        self._jobs.add(1)
        try:
            return await run_while_connected(request, start())
        finally:
            self._jobs.add(-1)
