"""EngineClient against a peer that says what a test tells it: names on the wire, choices, aborts, broken frames."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from pagewick.engine.child import EngineChild
from pagewick.engine.client import EngineClient
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    Abort,
    Add,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    Outputs,
    RequestDelta,
    ToEngine,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.progress import Progress
from pagewick.errors import EngineDeadError, InvalidRequestError
from pagewick.sampling_params import SamplingParams
from tests.engine.deltas import deltas_of

INFO = ModelInfo(
    model_path="model", architecture="Fake", dtype="float32", device="cpu", kernels="", vocab_size=100,
    embedding_size=8, max_model_len=50, max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_kv_blocks=8,
    kv_cache_bytes=0, num_parameters=0, tensor_parallel_size=1,
)  # fmt: skip
NUMBERS = {field.name: number for number, field in enumerate(structs.fields(EngineStats), start=1)}
LISTS = {name: [7, 0, 5] for name in NUMBERS if isinstance(getattr(EngineStats(), name), list)}
STATS = EngineStats(**{**NUMBERS, **LISTS})


class Process:
    """An engine process that has ended as soon as somebody waits for it."""

    pid = 2**22 + 1

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.next_returncode = 0

    async def wait(self) -> int:
        self.returncode = self.next_returncode
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9


class Peer:
    """The engine's end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: Process) -> None:
        self.reader = reader
        self.writer = writer
        self.process = process

    async def hear(self) -> ToEngine:
        length = frame_length(await self.reader.readexactly(FRAME_HEADER_BYTES))
        return decode_to_engine(await self.reader.readexactly(length))

    async def hear_request(self) -> EngineRequest:
        message = await self.hear()
        assert isinstance(message, Add)
        (request,) = message.requests
        return request

    def say(self, *deltas: RequestDelta) -> None:
        self.send(Outputs(list(deltas), STATS))

    def send(self, message: FromEngine) -> None:
        self.writer.write(encode_frame(message))


@asynccontextmanager
async def connected() -> AsyncGenerator[tuple[EngineClient, Peer]]:
    ours, theirs = socket.socketpair()
    process = Process()
    client = EngineClient(
        EngineChild(process, Progress.private()),  # type: ignore[arg-type]
        *await asyncio.open_connection(sock=ours),
        INFO,
    )
    peer = Peer(*await asyncio.open_connection(sock=theirs), process)
    try:
        yield client, peer
    finally:
        peer.writer.close()
        await client.close()


Body = Callable[[EngineClient, Peer], Coroutine[Any, Any, None]]


def run(body: Body) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), connected() as (client, peer):
            await body(client, peer)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def request(request_id: str = "mine", **params: Any) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=SamplingParams(**params), seed=1)


def delta(wire_id: str, index: int = 0, *token_ids: int, **fields: Any) -> RequestDelta:
    return RequestDelta(request_id=wire_id, choice_index=index, token_ids=list(token_ids), **fields)


def collect(client: EngineClient, wanted: EngineRequest) -> asyncio.Task[list[RequestDelta]]:
    async def collected() -> list[RequestDelta]:
        return [one async for one in deltas_of(client, wanted)]

    return asyncio.create_task(collected())


def short(deltas: list[RequestDelta]) -> list[tuple[int, list[int], str | None]]:
    assert {one.request_id for one in deltas} == {"mine"}
    return [(one.choice_index, one.token_ids, one.finish_reason) for one in deltas]


def test_an_id_that_is_used_again_gets_nothing_of_the_old_request() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        async with aclosing(deltas_of(client, request())) as deltas:
            first = asyncio.create_task(anext(deltas))
            old = (await peer.hear_request()).request_id
            peer.say(delta(old, 0, 10))
            assert (await first).token_ids == [10]
        assert await peer.hear() == Abort([old])
        again = collect(client, request())
        new = (await peer.hear_request()).request_id
        assert new != old
        peer.say(delta(old, 0, 11), delta(new, 0, 12, finish_reason="stop"), delta(old, 0, 13))
        assert short(await again) == [(0, [12], "stop")]

    run(body)


def test_requests_of_one_moment_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the engine refuses those that are too many before it answers the others; but no frame gets too long.

    Whatever the parameters hold counts too.
    """

    async def body(client: EngineClient, peer: Peer) -> None:
        answers = [collect(client, request(f"r{number}")) for number in range(5)]
        message = await peer.hear()
        assert isinstance(message, Add)
        wire_ids = [one.request_id for one in message.requests]
        assert len(set(wire_ids)) == 5
        peer.say(*(delta(wire_id, finish_reason="stop") for wire_id in wire_ids))
        await asyncio.gather(*answers)
        # Longer frames are refused by the receiver; all five requests together have about 6000 bytes.
        monkeypatch.setattr("pagewick.engine.messages.MAX_FRAME_BYTES", 2500)
        large: list[dict[str, Any]] = [
            {"allowed_token_ids": [*range(100)]},
            {"logit_bias": dict.fromkeys(range(80), 1.5)},
            {"bad_words": ["x" * 128] * 6},
            {"stop_token_ids": [*range(64)]},
            {},
        ]
        answers = [collect(client, request(f"r{number}", **params)) for number, params in enumerate(large)]
        heard: list[EngineRequest] = []
        sizes = []
        while len(heard) < 5:
            message = await peer.hear()
            assert isinstance(message, Add)
            sizes.append(len(message.requests))
            heard += message.requests
            peer.say(*(delta(one.request_id, finish_reason="stop") for one in message.requests))
        assert sizes == [1, 1, 1, 2]
        assert [one.params for one in heard] == [SamplingParams(**params) for params in large]
        await asyncio.gather(*answers)

    run(body)


def test_a_request_is_sent_before_its_abort() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        deltas = deltas_of(client, request())
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        client.abort(["mine"])
        assert (await first).finish_reason == "abort"
        await deltas.aclose()
        wire_id = (await peer.hear_request()).request_id
        assert await peer.hear() == Abort([wire_id])

    run(body)


def test_an_id_in_use_is_refused() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        first = collect(client, request())
        wire_id = (await peer.hear_request()).request_id
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(client, request())
        peer.say(delta(wire_id, finish_reason="stop"))
        assert short(await first) == [(0, [], "stop")]

    run(body)


def test_a_request_is_over_when_all_its_choices_are() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        answer = collect(client, request(n=3))
        wire_id = (await peer.hear_request()).request_id
        peer.say(delta(wire_id, 1, 5, finish_reason="stop"), delta(wire_id, 0, 6))
        peer.say(delta(wire_id, 2, 7, finish_reason="length"), delta(wire_id, 0, 8, finish_reason="stop"))
        assert short(await answer) == [(1, [5], "stop"), (0, [6], None), (2, [7], "length"), (0, [8], "stop")]
        # Nothing is aborted: the next thing said is another request.
        again = collect(client, request())
        peer.say(delta((await peer.hear_request()).request_id, finish_reason="stop"))
        await again

    run(body)


def test_deltas_that_come_together_are_given_together() -> None:
    """However the bytes are divided: a message that is cut in two waits for its end."""

    async def body(client: EngineClient, peer: Peer) -> None:
        news: dict[str, list[list[list[int]]]] = {"one": [], "two": []}
        ended = asyncio.Event()

        def take(name: str, deltas: list[RequestDelta] | Exception) -> None:
            assert isinstance(deltas, list)
            news[name].append([one.token_ids for one in deltas])
            if deltas[-1].finish_reason is not None:
                ended.set()

        for name in news:
            client.open(request(name), partial(take, name))
        message = await peer.hear()
        assert isinstance(message, Add)
        one, two = (wanted.request_id for wanted in message.requests)
        steps = [Outputs([delta(one, 0, number), delta(two, 0, -number)], STATS) for number in (1, 2, 3)]
        frames = b"".join(encode_frame(step) for step in steps)
        cut = len(frames) - 5
        peer.writer.write(frames[:cut])
        while not news["two"]:
            await asyncio.sleep(0.001)
        peer.writer.write(frames[cut:] + encode_frame(Outputs([delta(one, 0, 4, finish_reason="stop")], STATS)))
        await ended.wait()
        assert news == {"one": [[[1], [2]], [[3], [4]]], "two": [[[-1], [-2]], [[-3]]]}

    run(body)


def test_an_aborted_choice_says_no_more_and_the_others_go_on() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        answer = collect(client, request(n=2))
        wire_id = (await peer.hear_request()).request_id
        client.abort([], [("mine", 1), ("unknown", 0)])
        assert await peer.hear() == Abort([], [(wire_id, 1)])
        peer.say(delta(wire_id, 1, 5), delta(wire_id, 0, 6))  # what was on its way
        peer.say(delta(wire_id, 0, 7, finish_reason="length"))
        assert short(await answer) == [(1, [], "abort"), (0, [6], None), (0, [7], "length")]

    run(body)


def test_an_aborted_request_ends_every_choice() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        answer = collect(client, request(n=3))
        wire_id = (await peer.hear_request()).request_id
        peer.say(delta(wire_id, 1, finish_reason="stop"))
        await asyncio.sleep(0.05)
        client.abort(["mine", "unknown"])
        assert await peer.hear() == Abort([wire_id])
        assert short(await answer) == [(1, [], "stop"), (0, [], "abort"), (2, [], "abort")]
        client.abort(["mine"])  # it is over

    run(body)


def test_leaving_after_a_failure_aborts_the_other_choices() -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        async with aclosing(deltas_of(client, request(n=2))) as deltas:
            first = asyncio.create_task(anext(deltas))
            wire_id = (await peer.hear_request()).request_id
            peer.say(delta(wire_id, 0, finish_reason="error", error="NaN", error_kind="EngineError"))
            assert (await first).error == "NaN"
        assert await peer.hear() == Abort([wire_id])

    run(body)


GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_waiting_tokens", "oldest_wait_s", "num_blocks",
    "num_free_blocks", "num_cached_blocks", "num_referenced_blocks", "num_session_blocks", "num_host_blocks",
    "num_disk_blocks", "num_leaked_blocks", "num_sessions",
}  # fmt: skip


def break_off(peer: Peer, how: str) -> str:
    """End the connection in some way; what the cause must say."""
    if how == "garbage":
        peer.writer.write((3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
    elif how == "other type":
        peer.writer.write(encode_frame(Abort(["x"])))  # type: ignore[arg-type]
    elif how == "too long":
        peer.writer.write(b"\xff" * 8)
    elif how == "failed":
        peer.send(Failed("EngineError", "the engine failed: out of ideas"))
    else:
        peer.process.next_returncode = -9 if how == "killed" else 3
        peer.writer.close()
    return {
        "garbage": "something that is not a message",
        "other type": "something that is not a message",
        "too long": "a frame of 4294967295 bytes",
        "failed": "out of ideas",
        "killed": "was killed",
        "exited": "exit status 3",
    }[how]


@pytest.mark.parametrize("how", ["garbage", "other type", "too long", "failed", "killed", "exited"])
def test_a_connection_that_breaks_says_why(how: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "pagewick")

    async def body(client: EngineClient, peer: Peer) -> None:
        answers = [collect(client, request(f"r{number}")) for number in range(2)]
        await peer.hear()
        peer.say()
        cause = break_off(peer, how)
        for answer in answers:
            with pytest.raises(EngineDeadError, match=cause):
                await answer
        assert not client.is_alive and client.ended.is_set()
        assert client.health.state == "dead" and client.health.reason.endswith("; restart the server")
        assert cause in caplog.text and len(caplog.records) == 1
        assert await peer.reader.read() == b"", "the connection is still open"
        # Gauges are 0 now; totals stay.
        assert {name: getattr(client.stats, name) for name in GAUGES} == dict.fromkeys(GAUGES, 0)
        others = set(EngineStats.__struct_fields__) - GAUGES
        assert {name: getattr(client.stats, name) for name in others} == {name: getattr(STATS, name) for name in others}
        with pytest.raises(EngineDeadError, match=cause):
            await collect(client, request())
        client.abort(["mine"], [("mine", 0)])

    run(body)


def test_an_end_on_purpose_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        answer = collect(client, request())
        await peer.hear_request()
        await client.close()
        with pytest.raises(EngineDeadError):
            await answer
        assert not caplog.records

    run(body)
