"""Peer: an API process as the hub sees it while it runs. It handles the messages that the process sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pagewick import errors
from pagewick.engine.messages import Abort, Add, EngineStats, Failed
from pagewick.engine.progress import Reading
from pagewick.engine.supervisor import Supervisor
from pagewick.errors import EngineError, InvalidRequestError, PagewickError
from pagewick.server.core.conversations import Conversations, Recording
from pagewick.server.core.stored_responses import StoredResponses
from pagewick.server.errors import ApiError
from pagewick.server.hub.connection import Connection
from pagewick.server.hub.kept_responses import answer_of
from pagewick.server.hub.messages import (
    Answer,
    AskReports,
    Begin,
    FindResponse,
    Forget,
    ForgetResponse,
    FromApi,
    Idle,
    Keep,
    KeepResponse,
    Loaded,
    Read,
    Refusal,
    Report,
    Serve,
    Serving,
    WantReport,
    raw,
)
from pagewick.server.hub.relay import Relay

# Processor time that a process may take to load before it hears the hub.
_LOADING_CPU_S = 60.0
# Seconds to wait for a busy session: the end of its last request, which another process has sent, may not have been
# read yet.
_BUSY_GRACE_S = 0.02


class Peer:
    """One API process, from its start to its end.

    loaded: done once it has loaded its text, or failed to. serving, idle: set once it serves, and once it has no more
    requests. report: the latest Report of its metrics. reports: returns those of all processes. responses: those that
    all processes keep together; None: it has its own.
    """

    def __init__(
        self,
        connection: Connection[FromApi],
        conversations: Conversations,
        reports: Callable[[], Awaitable[list[msgspec.Raw]]],
        responses: StoredResponses | None = None,
    ) -> None:
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_chat_template = False
        self.serving, self.idle = asyncio.Event(), asyncio.Event()
        self.report: msgspec.Raw | None = None
        self.send = connection.send
        self._connection = connection
        self._conversations = conversations
        self._responses = responses or StoredResponses()
        self._reports = reports
        self._relay: Relay | None = None
        self._is_over = False
        self._num_reports = 0
        self._report_wanted: asyncio.Future[None] | None = None
        self._report_wanted_at = 0.0
        self._beginning: set[int] = set()
        self._recordings: dict[int, Recording] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Number of its requests in the engine."""
        return 0 if self._relay is None else self._relay.num_running

    @property
    def owed_s(self) -> float:
        """Seconds for which it has owed a report; 0 if it owes none."""
        wanted = self._report_wanted
        return 0.0 if wanted is None or wanted.done() else time.monotonic() - self._report_wanted_at

    def progress(self) -> Reading:
        """Return its progress, as a Watchdog reads it: it works on the report that it owes."""
        allowed_cpu_s = 0.0 if self.loaded.done() else _LOADING_CPU_S
        return Reading(count=self._num_reports, is_busy=self.owed_s > 0, allowed_cpu_s=allowed_cpu_s)

    async def listen(self) -> None:
        """Handle its messages until it ends."""
        while messages := await self._connection.receive():
            for message in messages:
                self._handle(message)

    def serve(self, engine: Supervisor) -> None:
        """Let it serve requests with this engine."""
        self._relay = Relay(engine, self.send)
        self.send(Serve(engine.info, engine.stats, engine.health))

    def pass_on(self, stats: EngineStats) -> None:
        if self._relay is not None:
            self._relay.pass_on(stats)

    def refresh(self, stats: EngineStats) -> None:
        if self._relay is not None:
            self._relay.refresh(stats)

    def wanted_report(self) -> asyncio.Future[None]:
        """Ask for a new report; the future is done once it is there, or will never be."""
        if self._report_wanted is None or self._report_wanted.done():
            self._report_wanted = asyncio.get_running_loop().create_future()
            self._report_wanted_at = time.monotonic()
            self.send(WantReport())
        return self._report_wanted

    def close(self) -> None:
        """End what it has begun, because it is over."""
        self._is_over = True
        if self._relay is not None:
            self._relay.close()
        for recording in self._recordings.values():
            recording.close()
        self._end_wait_for_report()
        for task in self._answering:
            task.cancel()
        self.idle.set()
        self._connection.close()

    def _handle(self, message: FromApi) -> None:
        match message:
            case Add() if self._relay is not None:
                self._relay.add(message.requests)
            case Abort() if self._relay is not None:
                self._relay.abort(message)
            case Begin():
                self._beginning.add(message.ticket)
                self._begin(message, is_last=False)
            case Keep():
                self._keep(message)
            case Read():
                self._answer(message.ticket, self._conversations.messages(message.owner, message.session_id))
            case Forget():
                self._answer(message.ticket, self._conversations.forget(message.owner, message.session_id))
            case KeepResponse() | FindResponse() | ForgetResponse():
                self._answer(message.ticket, answer_of(message, self._responses))
            case AskReports():
                task = asyncio.create_task(self._answer_reports(message.ticket))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case Report():
                self.report = message.families
                self._num_reports += 1
                self._end_wait_for_report()
            case Loaded():
                self.has_chat_template = message.has_chat_template
                self.loaded.set_result(None)
            case Failed():
                self.loaded.set_exception(_error_of(message))
            case Serving():
                self.serving.set()
            case Idle():
                self.idle.set()

    def _end_wait_for_report(self) -> None:
        if self._report_wanted is not None and not self._report_wanted.done():
            self._report_wanted.set_result(None)

    def _answer(self, ticket: int, value: Any) -> None:
        self.send(Answer(ticket, raw(value)))

    async def _answer_reports(self, ticket: int) -> None:
        self._answer(ticket, await self._reports())

    def _begin(self, asked: Begin, *, is_last: bool) -> None:
        """Begin a request of a session; if that is busy, try once more a little later."""
        if self._is_over or asked.ticket not in self._beginning:
            return
        try:
            recording = self._conversations.begin(
                asked.owner, asked.session_id, asked.new, is_continuation=asked.is_continuation
            )
        except ApiError as error:
            if not is_last:
                asyncio.get_running_loop().call_later(_BUSY_GRACE_S, lambda: self._begin(asked, is_last=True))
                return
            refusal = Refusal(error.message, error.status, error.param, error.code)
            self.send(Answer(asked.ticket, error=refusal))
        except InvalidRequestError as error:
            self.send(Answer(asked.ticket, error=Refusal(str(error), 0, error.param, error.code)))
        else:
            self._recordings[asked.ticket] = recording
            self._answer(asked.ticket, recording.messages)
        self._beginning.discard(asked.ticket)

    def _keep(self, message: Keep) -> None:
        self._beginning.discard(message.ticket)
        if (recording := self._recordings.pop(message.ticket, None)) is not None:
            recording.keep(message.messages)


def _error_of(message: Failed) -> PagewickError:
    kind: type[PagewickError] = getattr(errors, message.kind, EngineError)
    return kind(message.message)
