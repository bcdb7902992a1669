"""HubClient: the engine as an API process sees it, behind the hub. It has the interface of EngineClient."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pagewick import errors
from pagewick.engine.admission import check_request
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineRequest, Outputs
from pagewick.engine.open_requests import OpenRequests, Take
from pagewick.errors import EngineDeadError, EngineError, InvalidRequestError, UnsupportedError
from pagewick.server.hub.messages import Loss, Losses, Serve, State


class HubClient:
    """The requests of one API process. info, stats: the latest that the hub has sent.

    send: sends a message to the hub. number: that of the API process, which makes its requests' ids unique.
    """

    def __init__(self, send: Callable[[msgspec.Struct], None], number: int, serve: Serve) -> None:
        self.info = serve.info
        self.stats = serve.stats
        self._health = serve.health
        self._health_at = time.monotonic()
        self._requests = OpenRequests(send, f"{number}-")

    @property
    def is_alive(self) -> bool:
        return self._health.state == "ready"

    @property
    def health(self) -> EngineHealth:
        """As Supervisor.health. retry_after_s counts down here, too."""
        elapsed_s = int(time.monotonic() - self._health_at)
        if self._health.state != "restarting" or not elapsed_s:
            return self._health
        return msgspec.structs.replace(self._health, retry_after_s=max(1, self._health.retry_after_s - elapsed_s))

    def open(self, request: EngineRequest, take: Take) -> Callable[[], None]:
        """As Supervisor.open."""
        health = self.health
        if health.state != "ready":
            message = f"{health.reason}; try again in {health.retry_after_s} seconds"
            raise EngineDeadError(message, retry_after_s=health.retry_after_s)
        check_request(request, self.info)
        return self._requests.open(request, take)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        """As EngineClient.abort."""
        self._requests.abort(request_ids, choices)

    async def change_adapter(self, name: str, path: str = "", *, replaces: bool = False) -> None:
        """Raise UnsupportedError: the other API processes would not know of the change."""
        raise UnsupportedError("adapters cannot be loaded or unloaded while several API processes run")

    async def close(self) -> None:
        """Leave the engine to the hub, which ends it."""

    def give(self, outputs: Iterable[Outputs]) -> None:
        """Give the requests the news of one read."""
        deltas = []
        for one in outputs:
            self.stats = one.stats
            deltas += one.deltas
        self._requests.give(deltas)

    def lose(self, message: Losses) -> None:
        for loss in message.losses:
            self._requests.fail(loss.request_id, _error_of(loss))

    def enter(self, state: State) -> None:
        self.info, self._health, self._health_at = state.info, state.health, time.monotonic()


def _error_of(loss: Loss) -> EngineError | InvalidRequestError:
    kind = getattr(errors, loss.kind, EngineError)
    assert issubclass(kind, EngineError | InvalidRequestError), "the hub broke the protocol"
    if kind is EngineDeadError and loss.retry_after_s:
        return EngineDeadError(loss.message, retry_after_s=loss.retry_after_s)
    return kind(loss.message)
