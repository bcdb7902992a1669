"""Limits of the waiting queue. A request beyond them is refused and told when to retry."""

from __future__ import annotations

import math
from collections import deque

from pagewick.errors import QueueFullError

_NUM_REMEMBERED = 32
_MAX_RETRY_AFTER_S = 120
# Images of all unfinished requests together; a single request may have more.
MAX_IMAGE_BYTES = 2**30


class QueueLimits:
    """max_requests, max_tokens: of requests that have not started yet, and of their prompts; None is no limit."""

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._finished_at: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def note_finished(self, now: float) -> None:
        """Note the end of a request, for the estimate of the queue's pace."""
        self._finished_at.append(now)

    def check(self, num_waiting: int, num_waiting_tokens: int, num_new_tokens: int, now: float) -> None:
        """Raise QueueFullError if one more request, of `num_new_tokens` tokens, may not join the queue."""
        if num_waiting == 0:
            # The pace at which requests ended while none had to wait says how busy the server was, not how fast it is.
            self._finished_at.clear()
        if self._max_requests is not None and num_waiting >= self._max_requests:
            cause = f"{num_waiting} requests wait already, and --max-waiting-requests is {self._max_requests}"
        elif self._max_tokens is not None and num_waiting and num_waiting_tokens + num_new_tokens > self._max_tokens:
            cause = (
                f"{num_waiting_tokens} tokens wait already; with {num_new_tokens} more that is above "
                f"--max-waiting-tokens {self._max_tokens}"
            )
        else:
            return
        raise self._refusal(cause, num_waiting, now)

    def check_images(self, num_held: int, num_new: int, num_waiting: int, now: float) -> None:
        """Raise QueueFullError if a request with images of `num_new` bytes may not join those with `num_held` bytes."""
        if num_held and num_new and num_held + num_new > MAX_IMAGE_BYTES:
            cause = f"the images of unfinished requests would take more than {MAX_IMAGE_BYTES // 2**20} MiB"
            raise self._refusal(cause, num_waiting, now)

    def _refusal(self, cause: str, num_waiting: int, now: float) -> QueueFullError:
        retry_after_s = self._retry_after(num_waiting, now)
        return QueueFullError(f"the server is busy: {cause}; retry in {retry_after_s} s", retry_after_s=retry_after_s)

    def _retry_after(self, num_waiting: int, now: float) -> int:
        """Return the seconds in which the queue should halve, at the pace at which requests ended lately."""
        if len(self._finished_at) < 2 or now <= self._finished_at[0]:
            return 1
        pace = len(self._finished_at) / (now - self._finished_at[0])
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_waiting / 2 / pace)))
