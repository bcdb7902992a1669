"""Questions that an API process asks the hub: recorded conversations, and the metrics of all processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from pagewick.errors import InvalidRequestError
from pagewick.server.core.conversations import Message, Recording
from pagewick.server.errors import ApiError
from pagewick.server.hub.messages import (
    Answer,
    AskReports,
    Begin,
    Forget,
    Keep,
    Question,
    Read,
    Refusal,
)
from pagewick.server.telemetry.metric_sums import Family, rendered, summed

_Value = TypeVar("_Value")


class Questions:
    """The questions of one API process. send: sends a message to the hub."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self.send = send
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def next_ticket(self) -> int:
        return next(self._tickets)

    async def ask(self, question: Question, kind: type[_Value]) -> _Value:
        """Return the answer. kind: its type. Raises ApiError and InvalidRequestError, as the hub says."""
        answer = self._waiting[question.ticket] = asyncio.get_running_loop().create_future()
        try:
            self.send(question)
            found = await answer
        finally:
            del self._waiting[question.ticket]
        if found.error is not None:
            raise _error_of(found.error)
        return msgspec.msgpack.decode(found.value, type=kind)

    def take(self, answer: Answer) -> None:
        """Give an answer to the question with its ticket, if that still waits."""
        waiting = self._waiting.get(answer.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def all_metrics(self) -> bytes:
        """Return the metrics of the whole server in Prometheus' text format."""
        reports = await self.ask(AskReports(self.next_ticket()), list[list[Family]])
        return rendered(summed(reports))


class HubConversations:
    """The ConversationStore of a server with several API processes; the hub has the sessions."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    async def begin(self, owner: str, session_id: str, new: Sequence[Message], *, is_continuation: bool) -> Recording:
        ticket = self._questions.next_ticket()

        def keep(messages: list[Message] | None) -> None:
            self._questions.send(Keep(ticket, messages))

        try:
            begin = Begin(ticket, owner, session_id, list(new), is_continuation)
            messages = await self._questions.ask(begin, list[dict[str, Any]])
        except OverflowError:  # MessagePack has integers of 64 bits only, and nothing was sent
            message = "messages has a number too large to be recorded; send it as a text"
            raise InvalidRequestError(message, param="messages") from None
        except asyncio.CancelledError:
            keep(None)
            raise
        return Recording(messages, is_continuation, keep)

    async def messages(self, owner: str, session_id: str) -> list[Message] | None:
        kind: Any = list[dict[str, Any]] | None
        found: list[Message] | None = await self._questions.ask(
            Read(self._questions.next_ticket(), owner, session_id), kind
        )
        return found

    async def forget(self, owner: str, session_id: str) -> bool:
        return await self._questions.ask(Forget(self._questions.next_ticket(), owner, session_id), bool)


def _error_of(refusal: Refusal) -> ApiError | InvalidRequestError:
    if refusal.status:
        return ApiError(refusal.status, refusal.message, param=refusal.param, code=refusal.code)
    return InvalidRequestError(refusal.message, param=refusal.param, code=refusal.code)
