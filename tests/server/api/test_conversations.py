"""Recorded conversations: which messages are kept, for whom and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.errors import InvalidRequestError
from pagewick.outputs import PartDelta, PartKind
from pagewick.server.core.conversations import (
    MAX_SESSION_BYTES,
    MAX_SESSIONS,
    MAX_TOTAL_BYTES,
    Conversations,
)
from pagewick.server.core.limits import MAX_MESSAGES
from pagewick.server.errors import ApiError
from pagewick.text.output_stream import ChoiceDelta
from tests.fake_engine import FakeClient
from tests.server.api_routes import CHAT, HELLO, Api, error_of

SESSION = "/v1/sessions/s%20/1"
SESSION_TTL_S = 600.0
RECORD: dict[str, Any] = {"session_id": "s /1", "record_conversation": True}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def said(text: str, *, reasoning: str = "", **fields: Any) -> ChoiceDelta:
    parts = [PartDelta(PartKind.REASONING, reasoning)] if reasoning else []
    return ChoiceDelta(0, [*parts, PartDelta(PartKind.TEXT, text)], **fields)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [user(text)], **RECORD, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_request_sends_only_what_is_new(stream: bool) -> None:
    api = Api()

    async def talk(http: httpx.AsyncClient) -> None:
        api.client.texts = ["one"]
        assert (await http.post(CHAT, json=ask("a", stream=stream))).status_code == 200
        api.client.texts = ["two"]
        assert (await http.post(CHAT, json=ask("b", stream=stream))).status_code == 200
        assert api.prompt == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        body = (await http.get(SESSION)).json()
        assert body == {
            "id": "s /1",
            "object": "session",
            "messages": [user("a"), assistant("one"), user("b"), assistant("two")],
        }
        assert (await http.delete(SESSION)).json() == {"id": "s /1", "object": "session.deleted", "deleted": True}
        assert error_of(await http.get(SESSION), 404)["code"] == "session_not_found"
        assert error_of(await http.delete(SESSION), 404)["code"] == "session_not_found"
        await http.post(CHAT, json=ask("c", stream=stream))
        assert api.prompt == "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"

    api.run(talk)


def test_nothing_is_recorded_unasked() -> None:
    async def talk(http: httpx.AsyncClient) -> int:
        await http.post(CHAT, json={"messages": HELLO, "session_id": "s /1"})
        return (await http.get(SESSION)).status_code

    assert Api().run(talk) == 404


def test_a_session_with_a_number_is_found_by_its_digits() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        await http.post(CHAT, json=ask("a", session_id=17))
        assert (await http.get("/v1/sessions/17")).json()["id"] == "17"
        await http.post(CHAT, json=ask("b", session_id="17"))
        assert len((await http.get("/v1/sessions/17")).json()["messages"]) == 4

    Api().run(talk)


def test_the_server_may_record_every_session() -> None:
    async def talk(http: httpx.AsyncClient) -> list[int]:
        statuses = []
        for fields in ({}, {"session_id": "s /1", "record_conversation": False}, {"session_id": "s /1"}):
            assert (await http.post(CHAT, json={"messages": HELLO, **fields})).status_code == 200
            statuses.append((await http.get(SESSION)).status_code)
        return statuses

    assert Api(record_conversation=True).run(talk) == [404, 404, 200]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": None}, "session_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"n": 2}, "n"),
        ({"record_conversation": "yes"}, "record_conversation"),
        ({"messages": [user("x" * MAX_SESSION_BYTES), user("y")]}, "session_id"),
    ],
)
def test_requests_that_cannot_be_recorded_are_refused(fields: dict[str, Any], param: str) -> None:
    api = Api()
    assert error_of(api.chat(**{**RECORD, **fields}))["param"] == param
    assert not api.client.requests


def test_each_key_has_sessions_of_its_own() -> None:
    api = Api()

    async def talk(http: httpx.AsyncClient) -> list[Any]:
        mine, other = {"x-test-key": "mine"}, {"x-test-key": "other"}
        await http.post(CHAT, json=ask("a"), headers=mine)
        seen: list[Any] = [(await http.get(SESSION, headers=key)).status_code for key in (mine, other)]
        seen.append((await http.delete(SESSION, headers=other)).status_code)
        await http.post(CHAT, json=ask("b"), headers=other)
        seen.append(api.prompt.count("user"))
        return seen

    assert api.run(talk) == [200, 404, 404, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_request_at_the_same_time_is_a_conflict(stream: bool) -> None:
    api = Api()

    async def talk(http: httpx.AsyncClient) -> None:
        api.client.pause_at = 2
        first = asyncio.create_task(http.post(CHAT, json=ask("a", stream=stream)))
        while not api.client.num_paused:
            await asyncio.sleep(0)
        error = error_of(await http.post(CHAT, json=ask("b")), 409)
        assert (error["code"], error["param"]) == ("session_busy", "session_id")
        # Another session is not held up, and who does not record neither.
        api.client.pause_at = None
        assert (await http.post(CHAT, json=ask("b", session_id="t"))).status_code == 200
        assert (await http.post(CHAT, json=ask("b", record_conversation=False))).status_code == 200
        api.client.go_on()
        assert (await first).status_code == 200
        assert (await http.post(CHAT, json=ask("c"))).status_code == 200
        assert [one["content"] for one in (await http.get(SESSION)).json()["messages"]][::2] == ["a", "c"]

    api.run(talk)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 2])
def test_a_request_that_fails_leaves_no_trace(stream: bool, pause_at: int) -> None:
    api = Api()

    async def talk(http: httpx.AsyncClient) -> None:
        assert (await http.post(CHAT, json=ask("a"))).status_code == 200
        before = (await http.get(SESSION)).json()
        api.client.pause_at, api.client.failure = pause_at, {"error": "because"}
        await http.post(CHAT, json=ask("b", stream=stream))
        # Refused before there is anything to run.
        assert (await http.post(CHAT, json=ask("c", max_tokens=10**6))).status_code == 400
        api.client.pause_at = None
        assert (await http.get(SESSION)).json() == before
        assert (await http.post(CHAT, json=ask("d"))).status_code == 200

    api.run(talk)


def test_instructions_are_replaced_not_repeated() -> None:
    api = Api()

    async def talk(http: httpx.AsyncClient) -> list[Any]:
        for rules, text in (("Old.", "a"), ("New.", "b")):
            messages = [{"role": "system", "content": rules}, user(text)]
            await http.post(CHAT, json={"messages": messages, **RECORD})
        await http.post(CHAT, json=ask("c"))
        recorded = (await http.get(SESSION)).json()["messages"]
        return [one["content"] for one in recorded if one["role"] != "assistant"]

    assert api.run(talk) == ["New.", "a", "b", "c"]


def test_a_continued_message_is_one_message() -> None:
    api = Api()
    api.client.texts = [" Paris."]

    async def talk(http: httpx.AsyncClient) -> Any:
        messages = [user("Where?"), assistant("In")]
        await http.post(CHAT, json={"messages": messages, "continue_final_message": True, **RECORD})
        return (await http.get(SESSION)).json()["messages"]

    assert api.run(talk) == [user("Where?"), assistant("In Paris.")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(conversations: Conversations, session_id: str, text: str = "x") -> None:
    recording = conversations.begin("", session_id, [user(text)])
    recording.observe(said("y", token_ids=[1], finish_reason="stop"))


def test_a_response_is_recorded_only_when_it_is_complete() -> None:
    conversations = Conversations(SESSION_TTL_S)
    for reason in ("stop", "length"):
        recording = conversations.begin("", reason, [user("a")])
        recording.observe(said("1", reasoning="hm"))
        assert conversations.messages("", reason) is None
        recording.observe(said("2", token_ids=[1], finish_reason=reason))
        recording.close()
        assert conversations.messages("", reason) == [
            user("a"),
            {"role": "assistant", "content": "12", "reasoning_content": "hm"},
        ]
    for reason in ("abort", "error"):
        conversations.begin("", reason, [user("a")]).observe(said("1", token_ids=[1], finish_reason=reason))
        assert conversations.messages("", reason) is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_no_tokens_records_nothing(stream: bool) -> None:
    class NoTokens(FakeClient):
        async def _deltas(self, request: EngineRequest, unfinished: set[int]) -> AsyncGenerator[RequestDelta]:
            if request.params.max_tokens == 0:
                yield RequestDelta(request_id=request.request_id, finish_reason="length")
                return
            async for delta in super()._deltas(request, unfinished):
                yield delta

    api = Api()
    api.client = NoTokens()
    api.client.texts = [""]

    async def talk(http: httpx.AsyncClient) -> None:
        assert (await http.post(CHAT, json=ask("a", max_tokens=0, stream=stream))).status_code == 200
        assert (await http.get(SESSION)).status_code == 404
        # An answer that is over with its first token is one.
        assert (await http.post(CHAT, json=ask("a", stream=stream))).status_code == 200
        assert (await http.get(SESSION)).json()["messages"] == [user("a"), assistant("")]
        assert (await http.post(CHAT, json=ask("b", max_tokens=0, stream=stream))).status_code == 200
        assert (await http.get(SESSION)).json()["messages"] == [user("a"), assistant("")]

    api.run(talk)


def test_sessions_are_forgotten_after_a_while() -> None:
    clock = Clock()
    conversations = Conversations(SESSION_TTL_S, clock)
    record(conversations, "old")
    clock.now = SESSION_TTL_S / 2
    record(conversations, "new")
    clock.now = SESSION_TTL_S + 1
    assert conversations.messages("", "old") is None and conversations.messages("", "new") is not None
    assert not conversations.forget("", "old") and conversations.forget("", "new")


def test_the_oldest_session_makes_room_unless_it_is_in_use() -> None:
    conversations = Conversations(SESSION_TTL_S)
    for number in range(MAX_SESSIONS):
        record(conversations, str(number))
    busy = conversations.begin("", "0", [user("again")])
    conversations.begin("", "one more", [user("a")]).observe(said("b", token_ids=[1], finish_reason="stop"))
    kept = [conversations.messages("", name) is not None for name in ("0", "1", "2", "one more")]
    assert kept == [True, False, True, True]
    busy.close()
    with pytest.raises(InvalidRequestError, match="start another session"):
        conversations.begin("", "0", [user("é" * (MAX_SESSION_BYTES // 2))])
    assert conversations.messages("", "0") == [user("x"), assistant("y")]


def test_all_sessions_together_have_a_limit() -> None:
    conversations = Conversations(SESSION_TTL_S)
    num_fitting = MAX_TOTAL_BYTES // MAX_SESSION_BYTES
    for number in range(num_fitting + 3):
        record(conversations, str(number), "x" * (MAX_SESSION_BYTES - 100))
    kept = [conversations.messages("", str(number)) is not None for number in range(num_fitting + 3)]
    assert kept == [False] * 3 + [True] * num_fitting


def test_many_small_messages_have_a_limit_too() -> None:
    conversations = Conversations(SESSION_TTL_S)
    conversations.begin("", "s", [user("")] * MAX_MESSAGES).close()
    with pytest.raises(InvalidRequestError, match="start another session"):
        conversations.begin("", "s", [user("")] * (MAX_MESSAGES + 1))
    record(conversations, "s")
    with pytest.raises(InvalidRequestError, match="start another session"):
        conversations.begin("", "s", [user("")] * (MAX_MESSAGES - 1))
    assert conversations.messages("", "s") == [user("x"), assistant("y")]


def test_a_session_that_is_deleted_while_a_request_runs_stays_deleted() -> None:
    conversations = Conversations(SESSION_TTL_S)
    record(conversations, "s")
    running = conversations.begin("", "s", [user("more")])
    with pytest.raises(ApiError):
        conversations.begin("", "s", [user("even more")])
    assert conversations.forget("", "s")
    running.observe(said("z", token_ids=[1], finish_reason="stop"))
    assert conversations.messages("", "s") is None
