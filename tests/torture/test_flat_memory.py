"""Thousands of short requests leave no memory, open file, thread or task behind in either process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from dataclasses import dataclass

from tests.torture.http_client import Address, Connection
from tests.torture.serving import CHAT, COMPLETIONS, Resources, Server

NUM_WARM_UP, NUM_REQUESTS, NUM_REQUESTS_DEEP = 600, 2000, 20_000
NUM_CLIENTS = 4
# Bytes. Allocators take memory by the megabyte and keep some of it. A leak of 2 KiB in every request exceeds this.
MAX_GROWTH = {"HTTP": 3 * 2**20, "engine": 5 * 2**20}
# Upper limit of the threads that pools, asyncio's own among them, start when all of theirs are busy.
NUM_POOLED_THREADS = 5 + min(32, (os.cpu_count() or 1) + 4)
_TASKS = re.compile(r"(\d+) tasks")


async def ask_many(address: Address, first: int, count: int) -> None:
    """Send requests over kept connections; 5 % of the clients leave within a response, 2 % are invalid."""
    numbers = iter(range(first, first + count))

    async def client() -> None:
        connection = await Connection.open(address)
        for number in numbers:
            if number % 20 == 0:
                fields = {"prompt": tokens_of(number), "max_tokens": 50, "ignore_eos": True, "stream": True}
                await connection.send("POST", COMPLETIONS, json.dumps(fields).encode())
                assert (await connection.read(num_events=2)).status == 200
                connection.leave()
                connection = await Connection.open(address)
                continue
            path, status, fields = request_of(number)
            await connection.send("POST", path, json.dumps(fields).encode(), x_request_id=f"m{number}")
            response = await connection.read()
            assert response.status == status and response.is_whole
        connection.leave()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))


async def fill_cache(address: Address) -> None:
    """Use every block of the KV cache once: its memory counts as the engine's from then on."""
    connection = await Connection.open(address)
    for number in range(40):
        fields = {"prompt": [100 + (number + place) % 90 for place in range(7 * 32)], "max_tokens": 1}
        await connection.send("POST", COMPLETIONS, json.dumps({**fields, "cache_salt": f"fill-{number}"}).encode())
        assert (await connection.read()).status == 200
    connection.leave()


def tokens_of(number: int) -> list[int]:
    """Return a prompt that no other request has. All have one length: oneDNN keeps code for each number of tokens."""
    return [100 + number // 64**place % 64 for place in range(6)]


def request_of(number: int) -> tuple[str, int, dict[str, object]]:
    if number % 50 == 1:
        return COMPLETIONS, 400, {"prompt": tokens_of(number), "max_tokens": -1}
    if number % 4 == 2:
        message = {"role": "user", "content": "Is it a port?"}
        return CHAT, 200, {"messages": [message], "max_tokens": 1, "stream": number % 8 == 2, "user": f"user-{number}"}
    return COMPLETIONS, 200, {"prompt": tokens_of(number), "max_tokens": 1, "cache_salt": f"salt-{number}"}


@dataclass(frozen=True)
class Held:
    """The resources of both processes. num_tasks: asyncio tasks of the HTTP process."""

    http: Resources
    engine: Resources
    num_tasks: int


def num_tasks(server: Server) -> int:
    def counts() -> list[int]:
        return [int(match[1]) for one in server.records() if (match := _TASKS.fullmatch(one["message"]))]

    num_before = len(counts())
    server.process.send_signal(signal.SIGUSR1)
    server.until(lambda: len(counts()) > num_before)
    return counts()[-1]


def held(server: Server) -> Held:
    server.wait_until_idle()
    # Connections that are being closed are gone by then.
    time.sleep(0.5)
    return Held(Resources.of(server.pid), Resources.of(server.engine().pid), num_tasks(server))


def test_nothing_grows_with_the_number_of_requests(server: Server, is_deep: bool) -> None:
    num_requests = NUM_REQUESTS_DEEP if is_deep else NUM_REQUESTS
    asyncio.run(fill_cache(server.address))
    asyncio.run(ask_many(server.address, 0, NUM_WARM_UP))
    before = held(server)
    asyncio.run(ask_many(server.address, NUM_WARM_UP, num_requests))
    after = held(server)
    for name, one, two in (("HTTP", before.http, after.http), ("engine", before.engine, after.engine)):
        growth = two.memory - one.memory
        print(f"{name}: {one.memory / 2**20:.1f} MiB, {growth / 1024:+.0f} KiB after {num_requests} requests")
        assert growth < MAX_GROWTH[name]
        assert two.num_fds <= one.num_fds and two.num_threads <= one.num_threads + NUM_POOLED_THREADS
    assert after.num_tasks <= before.num_tasks
