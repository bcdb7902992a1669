"""OpenRequests: the requests that wait for deltas from the other end of a connection. Imports no torch.

On the wire the name of a request is a number, so a request whose id is used again never gets the deltas of an earlier
one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from pagewick.engine.messages import Abort, Add, EngineRequest, RequestDelta
from pagewick.errors import InvalidRequestError

# Takes the news of a request; see `OpenRequests.open`.
Take = Callable[[list[RequestDelta] | Exception], None]


class OpenRequests:
    """The requests of one connection. send: sends a message. prefix: begins the names of all its requests."""

    def __init__(self, send: Callable[[Add | Abort], None], prefix: str = "") -> None:
        self._send_now = send
        self._names = (f"{prefix}{number}" for number in itertools.count())
        self._wire_ids: dict[str, str] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: list[EngineRequest] = []

    def open(self, request: EngineRequest, take: Take) -> Callable[[], None]:
        """Send a request, together with all others of this turn of the event loop. Returns the function that ends it.

        That function aborts what is unfinished. take: called with the request's news until every choice has a
        finish_reason: with all deltas that have come at once, or with an exception if none can come any more. It must
        not raise. Raises InvalidRequestError for an id that is in use.
        """
        if request.request_id in self._wire_ids:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        wire_id = next(self._names)
        # The engine gets all prompts of one HTTP request at once. If it refuses one of them, it reports that before any
        # token of the others.
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(structs.replace(request, request_id=wire_id))
        self._wire_ids[request.request_id] = wire_id
        self._waiting[wire_id] = _Waiting(request.request_id, set(range(request.params.n)), take)
        return partial(self._leave, wire_id)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        """Stop these requests, and these choices of requests; their last delta has the finish_reason "abort".

        Unknown ids are ignored.
        """
        wire_ids = [self._wire_ids[one] for one in request_ids if one in self._wire_ids]
        wire_choices = [(self._wire_ids[one], index) for one, index in choices if one in self._wire_ids]
        if not (wire_ids or wire_choices):
            return
        self._send(Abort(wire_ids, wire_choices))
        for wire_id in wire_ids:
            self._tell(wire_id, sorted(self._waiting[wire_id].unfinished))
        for wire_id, index in wire_choices:
            self._tell(wire_id, [index])

    def give(self, deltas: Iterable[RequestDelta]) -> None:
        """Give each request all of its deltas at once."""
        news: dict[str, list[RequestDelta]] = {}
        for delta in deltas:
            if (known := news.get(delta.request_id)) is None:
                news[delta.request_id] = [delta]
            else:
                known.append(delta)
        for wire_id, own in news.items():
            self._give(wire_id, own)

    def fail(self, wire_id: str, error: Exception) -> None:
        """End a request with an exception; unknown ones are ignored."""
        if (waiting := self._forget(wire_id)) is not None:
            waiting.take(error)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End all requests, each with an exception of its own, because the connection is gone. Nothing more is sent."""
        self._unsent.clear()
        lost = list(self._waiting.values())
        self._waiting.clear()
        self._wire_ids.clear()
        for one in lost:
            one.take(make_error())

    def _leave(self, wire_id: str) -> None:
        if self._forget(wire_id) is not None:
            self._send(Abort([wire_id]))

    def _forget(self, wire_id: str) -> _Waiting | None:
        """Remove a request; returns None if it is over already."""
        waiting = self._waiting.pop(wire_id, None)
        if waiting is not None:
            del self._wire_ids[waiting.request_id]
        return waiting

    def _tell(self, wire_id: str, aborted: Iterable[int]) -> None:
        """End these choices with an "abort" delta; what the engine still sends of them is dropped."""
        self._give(
            wire_id,
            [RequestDelta(request_id=wire_id, choice_index=index, finish_reason="abort") for index in aborted],
        )

    def _give(self, wire_id: str, deltas: list[RequestDelta]) -> None:
        """Give a request its deltas. Those of choices that have ended were in transit when these were aborted."""
        waiting = self._waiting.get(wire_id)
        if waiting is None:
            return
        unfinished = waiting.unfinished
        news = []
        for delta in deltas:
            if delta.choice_index in unfinished:
                news.append(delta)
                delta.request_id = waiting.request_id
                if delta.finish_reason is not None:
                    unfinished.remove(delta.choice_index)
        if not unfinished:
            self._forget(wire_id)
        if news:
            waiting.take(news)

    def _flush(self) -> None:
        requests, self._unsent = self._unsent, []
        if requests:
            self._send_now(Add(requests))

    def _send(self, message: Abort) -> None:
        self._flush()
        self._send_now(message)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for deltas. unfinished: indices of the choices without a finish_reason."""

    request_id: str
    unfinished: set[int]
    take: Take
