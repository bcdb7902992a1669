"""A Relay in the hub and a HubClient in an API process: the bytes of their messages pass. The engine is fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import (
    Abort,
    Add,
    EngineRequest,
    EngineStats,
    Outputs,
    RequestDelta,
    encode_frame,
    take_frames,
)
from pagewick.errors import EngineDeadError, InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.server.hub.client import HubClient
from pagewick.server.hub.messages import Losses, Serve, State, decode_from_api, decode_from_hub
from pagewick.server.hub.relay import Relay
from tests.fake_engine import FakeClient

News = list[RequestDelta] | Exception


class Engine(FakeClient):
    """An engine whose news a test gives. left: the ids of requests that were ended."""

    def __init__(self) -> None:
        super().__init__()
        self.takes: dict[str, Callable[[News], None]] = {}
        self.left: list[str] = []
        self.failure_of_open: Exception | None = None

    def open(self, request: EngineRequest, take: Callable[[News], None]) -> Callable[[], None]:
        if self.failure_of_open is not None:
            raise self.failure_of_open
        self.takes[request.request_id] = take
        return lambda: self.left.append(request.request_id)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        self.aborted_choices += choices


class Ends:
    """Both ends of a connection. sent: the types of the messages of the hub, with the number of their deltas."""

    def __init__(self, number: int = 3) -> None:
        self.engine = Engine()
        self.sent: list[tuple[str, int]] = []
        self.relay = Relay(self.engine, self._to_api)
        serve = Serve(self.engine.info, EngineStats(), EngineHealth("ready"))
        self.client = HubClient(self._to_hub, number, serve)

    def _to_hub(self, message: msgspec.Struct) -> None:
        for body in take_frames(bytearray(encode_frame(message))):
            received = decode_from_api(body)
            if isinstance(received, Add):
                self.relay.add(received.requests)
            else:
                assert isinstance(received, Abort)
                self.relay.abort(received)

    def _to_api(self, message: msgspec.Struct) -> None:
        for body in take_frames(bytearray(encode_frame(message))):
            received = decode_from_hub(body)
            self.sent.append((type(received).__name__, len(getattr(received, "deltas", ()))))
            if isinstance(received, Outputs):
                self.client.give([received])
            else:
                assert isinstance(received, Losses)
                self.client.lose(received)


def request(request_id: str, n: int = 1) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(n=n), seed=1)


def delta(request_id: str, token_id: int, **fields: Any) -> RequestDelta:
    return RequestDelta(request_id=request_id, token_ids=[token_id], **fields)


def run(test: Callable[[Ends], Coroutine[Any, Any, None]]) -> None:
    async def with_ends() -> None:
        await test(Ends())

    asyncio.run(with_ends())


def test_all_news_of_a_read_is_one_message() -> None:
    async def test(ends: Ends) -> None:
        news: dict[str, list[int]] = {"a": [], "b": []}
        for name, seen in news.items():
            ends.client.open(request(name), lambda new, seen=seen: seen.extend(one.token_ids[0] for one in new))  # type: ignore[misc, union-attr]
        await asyncio.sleep(0)
        # Its number makes the ids of an API process differ from those of all others.
        assert list(ends.engine.takes) == ["3-0", "3-1"]
        ends.engine.takes["3-0"]([delta("3-0", 7), delta("3-0", 8)])
        ends.engine.takes["3-1"]([delta("3-1", 9)])
        assert ends.sent == []
        stats = EngineStats(num_steps=4)
        ends.relay.pass_on(stats)
        assert ends.sent == [("Outputs", 3)] and news == {"a": [7, 8], "b": [9]} and ends.client.stats == stats
        ends.relay.pass_on(EngineStats(num_steps=5))
        assert len(ends.sent) == 1  # there was no news

    run(test)


def test_a_process_without_news_learns_the_statistics_once() -> None:
    async def test(ends: Ends) -> None:
        ends.relay.refresh(EngineStats(num_requests_waiting=9))
        ends.relay.refresh(EngineStats(num_requests_waiting=9))
        assert ends.sent == [("Outputs", 0)] and ends.client.stats.num_requests_waiting == 9

    run(test)


def test_requests_of_a_process_that_is_gone_leave_the_engine() -> None:
    async def test(ends: Ends) -> None:
        for name, n in (("a", 1), ("b", 2), ("c", 1)):
            ends.client.open(request(name, n), lambda new: None)
        await asyncio.sleep(0)
        ends.engine.takes["3-0"]([delta("3-0", 1, finish_reason="stop")])
        ends.engine.takes["3-1"]([delta("3-1", 1, finish_reason="stop")])
        assert ends.relay.num_running == 2
        ends.relay.close()
        assert ends.engine.left == ["3-1", "3-2"] and ends.relay.num_running == 0

    run(test)


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test(ends: Ends) -> None:
        ends.client.open(request("a"), lambda new: None)()
        ends.client.open(request("a", 2), lambda new: None)
        ends.client.abort([], [("a", 1)])
        assert ends.engine.left == ["3-0"] and ends.engine.aborted_choices == [("3-1", 1)]

    run(test)


def test_the_end_of_the_engine_is_an_error_of_every_request() -> None:
    async def test(ends: Ends) -> None:
        errors: list[Any] = []
        ends.client.open(request("a"), errors.append)
        await asyncio.sleep(0)
        ends.engine.failure_of_open = EngineDeadError("it is being restarted", retry_after_s=7)
        ends.client.open(request("b"), errors.append)
        await asyncio.sleep(0)
        ends.engine.takes["3-0"](EngineDeadError("it was killed"))
        ends.relay.pass_on(EngineStats())
        assert [(type(one), str(one), one.retry_after_s) for one in errors] == [
            (EngineDeadError, "it is being restarted", 7),
            (EngineDeadError, "it was killed", 5),
        ]
        assert ends.relay.num_running == 0

    run(test)


def test_a_request_that_the_engine_refuses_is_an_error_of_that_request() -> None:
    async def test(ends: Ends) -> None:
        errors: list[Any] = []
        ends.engine.failure_of_open = InvalidRequestError("it does not fit any more")
        ends.client.open(request("a"), errors.append)
        await asyncio.sleep(0)
        ends.relay.pass_on(EngineStats())
        assert [(type(one), str(one)) for one in errors] == [(InvalidRequestError, "it does not fit any more")]

    run(test)


def test_a_request_that_cannot_be_handed_on_is_told_at_once() -> None:
    """The engine may have no news for long. Those of other requests keep their order."""

    async def test(ends: Ends) -> None:
        errors: list[Any] = []
        news: list[Any] = []
        ends.client.open(request("a"), news.append)
        await asyncio.sleep(0)
        ends.engine.takes["3-0"]([delta("3-0", 7)])
        ends.engine.takes["3-0"](EngineDeadError("it was killed"))
        ends.engine.failure_of_open = EngineDeadError("it is being restarted", retry_after_s=7)
        ends.client.open(request("b"), errors.append)
        await asyncio.sleep(0)
        assert [(str(one), one.retry_after_s) for one in errors] == [("it is being restarted", 7)]
        assert news == []
        ends.relay.pass_on(EngineStats())
        assert [one.token_ids for one in news[0]] == [[7]] and isinstance(news[1], EngineDeadError)
        assert len(errors) == 1 and len(news) == 2

    run(test)


def test_no_request_is_sent_while_the_engine_restarts() -> None:
    async def test(ends: Ends) -> None:
        health = EngineHealth("restarting", "it was killed", retry_after_s=30)
        ends.client.enter(State(replace(ends.engine.info, max_model_len=17), health))
        assert not ends.client.is_alive and ends.client.info.max_model_len == 17
        with pytest.raises(EngineDeadError, match="it was killed; try again in 30 seconds") as caught:
            ends.client.open(request("a"), lambda new: None)
        assert caught.value.retry_after_s == 30

    run(test)
