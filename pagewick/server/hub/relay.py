"""Relay: passes the requests of one API process to the engine, and the news of them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from pagewick.engine.messages import Abort, EngineRequest, EngineStats, Outputs, RequestDelta
from pagewick.errors import PagewickError
from pagewick.generation import Client
from pagewick.server.hub.messages import Loss, Losses


@dataclass(slots=True)
class _Running:
    """A request in the engine. leave: ends it."""

    leave: Callable[[], None]
    num_unfinished: int


class Relay:
    """The requests of one API process, whose ids are unique among all API processes. send: sends it a message.

    The engine's news gathers until `pass_on` sends all of it at once.
    """

    def __init__(self, engine: Client, send: Callable[[msgspec.Struct], None]) -> None:
        self._engine = engine
        self._send = send
        self._running: dict[str, _Running] = {}
        self._deltas: list[RequestDelta] = []
        self._losses: list[Loss] = []
        self._known_stats: EngineStats | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand requests to the engine. Those that it does not take are told at once: it may have no news for long."""
        losses: list[Loss] = []
        for request in requests:
            try:
                leave = self._engine.open(request, partial(self._take, request.request_id))
            except PagewickError as error:
                losses.append(_loss_of(request.request_id, error))
            else:
                self._running[request.request_id] = _Running(leave, request.params.n)
        if losses:
            self._send(Losses(losses))

    def abort(self, message: Abort) -> None:
        for request_id in message.request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                running.leave()
        self._engine.abort([], message.choices)

    def pass_on(self, stats: EngineStats) -> None:
        """Send all news, with the engine's latest statistics."""
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._send(Outputs(deltas, stats))
            self._known_stats = stats
        if self._losses:
            losses, self._losses = self._losses, []
            self._send(Losses(losses))

    def refresh(self, stats: EngineStats) -> None:
        """Send the engine's statistics unless the process has these."""
        if stats != self._known_stats:
            self._send(Outputs([], stats))
            self._known_stats = stats

    def close(self) -> None:
        """End all requests, because the API process is gone."""
        for running in self._running.values():
            running.leave()
        self._running.clear()

    def _take(self, request_id: str, news: list[RequestDelta] | Exception) -> None:
        if isinstance(news, Exception):
            self._running.pop(request_id, None)
            self._losses.append(_loss_of(request_id, news))
            return
        self._deltas += news
        for delta in news:
            if delta.finish_reason is not None and (running := self._running.get(request_id)) is not None:
                running.num_unfinished -= 1
                if not running.num_unfinished:
                    del self._running[request_id]


def _loss_of(request_id: str, error: Exception) -> Loss:
    return Loss(request_id, type(error).__name__, str(error), getattr(error, "retry_after_s", 0))
