"""SIGTERM under load: new requests are refused, running ones finish or get an error, and nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
import time
from random import Random
from typing import Any

import psutil

from tests.torture.conftest import Servers
from tests.torture.http_client import Connection, Response, post
from tests.torture.serving import CHAT, COMPLETIONS, DEADLINE_S, MODEL, Server

CI_ROUNDS, DEEP_ROUNDS = 2, 10
# The --shutdown-timeout of the servers.
DRAIN_S = 1.0
# The documents promise one second more than the drain; a machine that is busy with other work may take longer.
SLACK_S = 8.0
NUM_KEPT = 4


def long_one(number: int) -> dict[str, Any]:
    """Return one of requests with very different lengths: some finish within the drain, others never would."""
    max_tokens = 20 if number % 3 == 0 else 1900
    fields = {"prompt": f"{number} is", "max_tokens": max_tokens, "ignore_eos": True}
    return {"model": MODEL, "stream": number % 2 == 0, **fields}


async def keep(server: Server) -> Connection:
    """Return a connection that has served a request and stays open."""
    connection = await Connection.open(server.address)
    await connection.send("GET", "/v1/models")
    assert (await connection.read()).status == 200
    return connection


async def ask_again(connection: Connection) -> Response | None:
    """Send a request on a kept connection; return None if the server has closed it by now."""
    try:
        await connection.send("POST", COMPLETIONS, b'{"prompt": "A", "max_tokens": 1}')
        return await connection.read()
    except (OSError, EOFError):
        return None
    finally:
        connection.leave()


async def ask_anew(server: Server) -> Response | None:
    """Send a request on a new connection; return None if the server no longer listens."""
    try:
        return await post(server.address, CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    except OSError:
        return None


async def end_under_load(server: Server, random: Random) -> tuple[list[Response], list[Response]]:
    """Return the responses to the requests in flight, and to those sent after the signal."""
    kept = [await keep(server) for _ in range(NUM_KEPT)]
    clients = [asyncio.create_task(post(server.address, COMPLETIONS, long_one(number))) for number in range(8)]
    await asyncio.sleep(random.uniform(0.3, 1.0))
    server.process.send_signal(signal.SIGTERM)
    # The server's event loop sees the signal in its next iteration; then readiness says so.
    await until_draining(server)
    # Pauses spread these requests over the drain.
    late = []
    for connection in kept:
        late += [await ask_again(connection), await ask_anew(server)]
        await asyncio.sleep(random.uniform(0, DRAIN_S / NUM_KEPT))
    return list(await asyncio.gather(*clients)), [
        response for response in late if response is not None and response.status
    ]


async def until_draining(server: Server) -> None:
    async with asyncio.timeout(DEADLINE_S), await Connection.open(server.address) as connection:
        while True:
            await connection.send("GET", "/health/ready")
            if (await connection.read()).status == 503:
                return


def check_in_flight(response: Response) -> None:
    assert response.is_terminated, response
    if response.error is None:
        assert response.finish_reasons == {0: "length"}
    else:
        assert "shutting down" in response.error["message"], response.error
        if not response.events:
            assert response.status == 503 and int(response.headers["retry-after"]) > 0


def check_late(response: Response) -> None:
    assert response.status == 503 and int(response.headers["retry-after"]) > 0
    assert response.is_whole and response.error is not None and "shutting down" in response.error["message"]
    assert response.headers["connection"] == "close"


def wait_for_end(server: Server, children: list[psutil.Process], begun: float, num_troubles: int) -> float:
    """Check that the server ends with exit status 0 and leaves nothing; return the seconds that it took."""
    assert server.process.wait(DEADLINE_S) == 0
    ended_s = time.monotonic() - begun
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert list(server.temporary.iterdir()) == []
    assert server.troubles()[num_troubles:] == []
    return ended_s


def test_requests_in_flight_end_and_new_ones_are_refused(servers: Servers, seed: int, is_deep: bool) -> None:
    random = Random(seed)
    num_refused = 0
    for _ in range(DEEP_ROUNDS if is_deep else CI_ROUNDS):
        server = servers.get("common")
        num_troubles = len(server.troubles())
        children = server.children()
        assert children
        begun_at: list[float] = []

        async def run(
            server: Server = server, begun_at: list[float] = begun_at
        ) -> tuple[list[Response], list[Response]]:
            begun_at.append(time.monotonic())
            return await end_under_load(server, random)

        in_flight, late = asyncio.run(run())
        ended_s = wait_for_end(server, children, begun_at[0], num_troubles)
        for response in in_flight:
            check_in_flight(response)
        for response in late:
            check_late(response)
        num_refused += len(late)
        # This includes up to a second of load before the signal.
        print(f"ended {ended_s:.1f} s after the load began; {len(late)} late requests were refused")
        assert ended_s < 1.0 + DRAIN_S + 1.0 + SLACK_S
    assert num_refused >= 2


def test_a_second_signal_ends_the_server_at_once(servers: Servers) -> None:
    server = servers.get("strict")
    num_troubles = len(server.troubles())
    children = server.children()

    async def run() -> Response:
        client = asyncio.create_task(post(server.address, COMPLETIONS, long_one(2)))
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        await until_draining(server)
        assert not client.done()
        server.process.send_signal(signal.SIGTERM)
        return await client

    begun = time.monotonic()
    response = asyncio.run(run())
    check_in_flight(response)
    assert response.error is not None
    assert wait_for_end(server, children, begun, num_troubles) < DEADLINE_S
