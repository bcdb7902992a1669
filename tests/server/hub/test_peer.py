"""Recorded sessions in the hub, asked for by API processes over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from pagewick.errors import InvalidRequestError
from pagewick.server.core.conversations import MAX_SESSION_BYTES, Conversations
from pagewick.server.core.stored_responses import StoredResponses
from pagewick.server.errors import ApiError
from pagewick.server.hub.connection import Connection
from pagewick.server.hub.kept_responses import HubResponses
from pagewick.server.hub.messages import Answer, FromHub, decode_from_api, decode_from_hub
from pagewick.server.hub.peer import Peer
from pagewick.server.hub.questions import HubConversations, Questions

ASK, RESPONSE = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


async def no_reports() -> list[msgspec.Raw]:
    return []


class ApiEnd:
    """An API process without HTTP, and its peer in the hub."""

    @classmethod
    async def connect(cls, conversations: Conversations, responses: StoredResponses) -> ApiEnd:
        self = cls()
        ours, theirs = socket.socketpair()
        self._connection: Connection[FromHub] = Connection(*await asyncio.open_connection(sock=theirs), decode_from_hub)
        connection = Connection(*await asyncio.open_connection(sock=ours), decode_from_api)
        peer = Peer(connection, conversations, no_reports, responses)
        questions = Questions(self._connection.send)
        self.conversations = HubConversations(questions)
        self.responses = HubResponses(questions)

        async def hear() -> None:
            while messages := await self._connection.receive():
                for message in messages:
                    assert isinstance(message, Answer)
                    questions.take(message)

        async def listen() -> None:
            await peer.listen()
            peer.close()

        self._tasks = [asyncio.create_task(listen()), asyncio.create_task(hear())]
        return self

    async def die(self) -> None:
        self._connection.close()
        await asyncio.gather(*self._tasks)


def run(test: Callable[[ApiEnd, ApiEnd], Coroutine[Any, Any, None]]) -> None:
    async def with_ends() -> None:
        conversations, responses = Conversations(60.0), StoredResponses()
        ends = [await ApiEnd.connect(conversations, responses) for _ in range(2)]
        try:
            await test(*ends)
        finally:
            for end in ends:
                await end.die()

    asyncio.run(with_ends())


def test_one_process_goes_on_where_another_one_ended() -> None:
    async def test(one: ApiEnd, other: ApiEnd) -> None:
        recording = await one.conversations.begin("key", "s", [ASK], is_continuation=False)
        recording.keep([*recording.messages, RESPONSE])
        # This may arrive before the end of the first request; the hub waits a moment for that.
        again = await other.conversations.begin("key", "s", [ASK], is_continuation=False)
        assert again.messages == [ASK, RESPONSE, ASK]
        again.close()
        assert await one.conversations.messages("key", "s") == [ASK, RESPONSE]
        assert await one.conversations.messages("another", "s") is None
        assert await other.conversations.forget("key", "s") and not await one.conversations.forget("key", "s")

    run(test)


def test_a_response_that_one_process_has_kept_is_found_through_another() -> None:
    async def test(one: ApiEnd, other: ApiEnd) -> None:
        await one.responses.keep("key", "r", b"body", ["i"])
        assert await other.responses.find("key", "r") == b"body" == await other.responses.find_by_item("key", "i")
        assert (
            await other.responses.find("another", "r") is None and await one.responses.find_by_item("key", "r") is None
        )
        assert not await other.responses.forget("another", "r")
        assert await other.responses.forget("key", "r") and not await one.responses.forget("key", "r")

    run(test)


def test_errors_keep_their_class_and_field() -> None:
    async def test(one: ApiEnd, other: ApiEnd) -> None:
        await one.conversations.begin("", "s", [ASK], is_continuation=False)
        with pytest.raises(ApiError, match="another request of session 's' is running") as busy:
            await other.conversations.begin("", "s", [ASK], is_continuation=False)
        assert (busy.value.status, busy.value.param, busy.value.code) == (409, "session_id", "session_busy")
        long = {"role": "user", "content": "x" * (MAX_SESSION_BYTES + 1)}
        with pytest.raises(InvalidRequestError, match="start another session") as refused:
            await other.conversations.begin("", "t", [long], is_continuation=False)
        assert refused.value.param == "session_id"

    run(test)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_that_messages_between_processes_cannot_hold_is_refused(number: int) -> None:
    async def test(one: ApiEnd, other: ApiEnd) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": number}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        with pytest.raises(InvalidRequestError, match="messages has a number too large to be recorded") as refused:
            await one.conversations.begin("", "s", [ASK, message, ASK], is_continuation=False)
        assert refused.value.param == "messages"
        (await other.conversations.begin("", "s", [ASK], is_continuation=False)).close()

    run(test)


def test_a_session_is_free_again_when_its_process_dies() -> None:
    async def test(one: ApiEnd, other: ApiEnd) -> None:
        await one.conversations.begin("", "s", [ASK], is_continuation=False)
        await one.die()
        recording = await other.conversations.begin("", "s", [RESPONSE], is_continuation=False)
        assert recording.messages == [RESPONSE]

    run(test)


def test_a_session_is_free_again_when_a_client_leaves_before_it_begins() -> None:
    async def test(one: ApiEnd, other: ApiEnd) -> None:
        held = await one.conversations.begin("", "s", [ASK], is_continuation=False)
        waiting = asyncio.create_task(other.conversations.begin("", "s", [ASK], is_continuation=False))
        await asyncio.sleep(0.005)  # the hub has it, and tries again a moment later
        waiting.cancel()
        held.close()
        await asyncio.sleep(0.03)
        (await one.conversations.begin("", "s", [ASK], is_continuation=False)).close()

    run(test)
