"""Hundreds of long requests are started and cancelled: nothing is left of them, and the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from tests.torture.http_client import Address, Connection, post
from tests.torture.serving import CHAT, COMPLETIONS, MODEL, Server

NUM_REQUESTS = 200
CANCELLED_AFTER_S = 1.0
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "What is Pagewick?"}], "temperature": 0}


async def start_and_leave(address: Address, number: int) -> None:
    """Start a request and disconnect. Every second one is streamed. No prompts share a prefix, and so no blocks."""
    fields = {
        "prompt": f"{number} " + "begins. " * 50,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": bool(number % 2),
    }
    async with await Connection.open(address) as connection:
        await connection.send("POST", COMPLETIONS, json.dumps({"model": MODEL, **fields}).encode())
        # From when the request is sent, so that a busy machine does not leave before that.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCELLED_AFTER_S):
                await connection.read()
                raise AssertionError("it finished before the client left")


async def storm(address: Address) -> None:
    await asyncio.gather(*(start_and_leave(address, number) for number in range(NUM_REQUESTS)))


async def seconds_to_response(address: Address) -> float:
    begun = time.monotonic()
    response = await post(address, CHAT, QUESTION)
    assert response.status == 200 and response.finish_reasons == {0: "stop"}
    return time.monotonic() - begun


def test_after_a_storm_the_next_request_is_served_as_soon_as_before(server: Server) -> None:
    async def body() -> tuple[float, float]:
        before_s = max([await seconds_to_response(server.address) for _ in range(3)])
        await storm(server.address)
        return before_s, await seconds_to_response(server.address)

    before = server.metrics()
    before_s, after_s = asyncio.run(body())
    idle = server.wait_until_idle()
    aborted = idle.finished["abort"] - before.finished["abort"]
    print(f"a response took {before_s:.2f} s before the storm and {after_s:.2f} s after it; {aborted} requests aborted")
    # Three times as long, since the machine may be busy with other work. To finish the cancelled ones takes minutes.
    assert after_s < 3 * before_s + 1.0
    # All requests that reached the engine were aborted there; the other clients left before theirs were read.
    assert 0 < aborted <= NUM_REQUESTS
    assert idle.finished - before.finished == {"abort": aborted, "stop": 4}


def test_connections_that_are_reset_leave_nothing(server: Server) -> None:
    """With SO_LINGER 0 the server notices at once that the client has left, even with data still to send."""

    async def reset(number: int) -> None:
        connection = await Connection.open(server.address)
        body = b'{"prompt": "%d", "max_tokens": 1000, "ignore_eos": true, "stream": true}' % number
        await connection.send("POST", COMPLETIONS, body)
        response = await connection.read_head()
        await connection.read_piece(response)
        sock = connection.writer.get_extra_info("socket")
        sock.setsockopt(1, 13, (1).to_bytes(4, "little") + bytes(4))
        connection.writer.transport.abort()

    async def body() -> None:
        await asyncio.gather(*(reset(number) for number in range(32)))

    before = server.metrics()
    asyncio.run(body())
    idle = server.wait_until_idle()
    assert idle.finished - before.finished == {"abort": 32}
    assert idle.statuses - before.statuses == {"200": 32}
