"""SIGTERM under load: new requests are sent elsewhere, running ones are told their end, nothing is left."""

from __future__ import annotations

import asyncio
import signal
import time
from random import Random
from typing import Any

import psutil

from tests.torture.conftest import Servers
from tests.torture.http_client import Answer, Connection, post
from tests.torture.serving import CHAT, COMPLETIONS, DEADLINE_S, MODEL, Server

CI_ROUNDS, DEEP_ROUNDS = 2, 10
# The --shutdown-timeout of the servers.
DRAIN_S = 1.0
# Promised is one second more than the drain; a machine that is busy with others may take some more.
SLACK_S = 8.0
NUM_KEPT = 4


def long_one(number: int) -> dict[str, Any]:
    """Of very different lengths: some are over within the drain, some never would be."""
    max_tokens = 20 if number % 3 == 0 else 1900
    fields = {"prompt": f"{number} is", "max_tokens": max_tokens, "ignore_eos": True}
    return {"model": MODEL, "stream": number % 2 == 0, **fields}


async def keep(server: Server) -> Connection:
    """A connection that was used, and stays open."""
    connection = await Connection.open(server.address)
    await connection.send("GET", "/v1/models")
    assert (await connection.read()).status == 200
    return connection


async def ask_again(connection: Connection) -> Answer | None:
    """None if the server has closed the connection by now."""
    try:
        await connection.send("POST", COMPLETIONS, b'{"prompt": "A", "max_tokens": 1}')
        return await connection.read()
    except (OSError, EOFError):
        return None
    finally:
        connection.leave()


async def ask_anew(server: Server) -> Answer | None:
    """None if the server does not listen any more."""
    try:
        return await post(server.address, CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    except OSError:
        return None


async def end_under_load(server: Server, random: Random) -> tuple[list[Answer], list[Answer]]:
    """What became of the requests in flight, and of those that came later."""
    kept = [await keep(server) for _ in range(NUM_KEPT)]
    clients = [asyncio.create_task(post(server.address, COMPLETIONS, long_one(number))) for number in range(8)]
    await asyncio.sleep(random.uniform(0.3, 1.0))
    server.process.send_signal(signal.SIGTERM)
    # The signal is seen by the next turn of the server's loop, at the latest when readiness says so.
    await until_draining(server)
    # Each with a pause before it, so that they are spread over the drain.
    late = []
    for connection in kept:
        late += [await ask_again(connection), await ask_anew(server)]
        await asyncio.sleep(random.uniform(0, DRAIN_S / NUM_KEPT))
    return list(await asyncio.gather(*clients)), [answer for answer in late if answer is not None and answer.status]


async def until_draining(server: Server) -> None:
    async with asyncio.timeout(DEADLINE_S), await Connection.open(server.address) as connection:
        while True:
            await connection.send("GET", "/health/ready")
            if (await connection.read()).status == 503:
                return


def check_in_flight(answer: Answer) -> None:
    assert answer.is_terminated, answer
    if answer.error is None:
        assert answer.finish_reasons == {0: "length"}
    else:
        assert "shutting down" in answer.error["message"], answer.error
        if not answer.events:
            assert answer.status == 503 and int(answer.headers["retry-after"]) > 0


def check_late(answer: Answer) -> None:
    assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.is_whole and answer.error is not None and "shutting down" in answer.error["message"]
    assert answer.headers["connection"] == "close"


def end_of(server: Server, family: list[psutil.Process], begun: float, num_troubles: int) -> float:
    """Seconds until the server's process had ended, with exit status 0 and no child left."""
    assert server.process.wait(DEADLINE_S) == 0
    ended_s = time.monotonic() - begun
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert list(server.temporary.iterdir()) == []
    assert server.troubles()[num_troubles:] == []
    return ended_s


def test_requests_in_flight_come_to_an_end_and_new_ones_go_elsewhere(
    servers: Servers, seed: int, is_deep: bool
) -> None:
    random = Random(seed)
    num_refused = 0
    for _ in range(DEEP_ROUNDS if is_deep else CI_ROUNDS):
        server = servers.get("common")
        num_troubles = len(server.troubles())
        family = server.family()
        assert family
        begun_at: list[float] = []

        async def run(server: Server = server, begun_at: list[float] = begun_at) -> tuple[list[Answer], list[Answer]]:
            begun_at.append(time.monotonic())
            return await end_under_load(server, random)

        in_flight, late = asyncio.run(run())
        ended_s = end_of(server, family, begun_at[0], num_troubles)
        for answer in in_flight:
            check_in_flight(answer)
        for answer in late:
            check_late(answer)
        num_refused += len(late)
        # begun: before the load, which takes up to a second before the signal.
        print(f"ended {ended_s:.1f} s after the load began; {len(late)} late ones were refused")
        assert ended_s < 1.0 + DRAIN_S + 1.0 + SLACK_S
    assert num_refused >= 2


def test_a_second_signal_ends_it_at_once(servers: Servers) -> None:
    server = servers.get("strict")
    num_troubles = len(server.troubles())
    family = server.family()

    async def run() -> Answer:
        client = asyncio.create_task(post(server.address, COMPLETIONS, long_one(2)))
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        await until_draining(server)
        assert not client.done()
        server.process.send_signal(signal.SIGTERM)
        return await client

    begun = time.monotonic()
    answer = asyncio.run(run())
    check_in_flight(answer)
    assert answer.error is not None
    assert end_of(server, family, begun, num_troubles) < DEADLINE_S
