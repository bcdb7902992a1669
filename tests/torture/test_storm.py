"""Hundreds of long requests are started and cancelled: none is finished, and the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import json

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


def test_after_a_storm_the_next_request_is_served(server: Server) -> None:
    async def body() -> None:
        await storm(server.address)
        response = await post(server.address, CHAT, QUESTION)
        assert response.status == 200 and response.finish_reasons == {0: "stop"}

    before = server.metrics()
    asyncio.run(body())
    idle = server.wait_until_idle()
    aborted = idle.finished["abort"] - before.finished["abort"]
    # All requests that reached the engine were aborted there, none had to be finished before the next was served; the
    # other clients left before theirs were read.
    assert 0 < aborted <= NUM_REQUESTS
    assert idle.finished - before.finished == {"abort": aborted, "stop": 1}


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
