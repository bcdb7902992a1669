"""Clients that read a byte a second, send nothing or stop halfway are disconnected; other clients are not affected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

from tests.torture.http_client import Address, head, post
from tests.torture.serving import CHAT, COMPLETIONS, MODEL, Resources, Server

NUM_READERS, NUM_READERS_DEEP = 40, 500
NUM_HALF_OPEN, NUM_HALF_OPEN_DEEP = 100, 1000
# Bytes that the kernel buffers on a client's side: few, so that the server's buffers fill up.
RECEIVE_BUFFER = 2304
MAX_BYTES_PER_READER = 2**20
NUM_HEALTHY = 4


async def connect(address: Address) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return connection


async def read_slowly(address: Address, number: int, is_over: asyncio.Event) -> str:
    """Read one byte a second of a response of some 200 KB, and return what was read."""
    loop = asyncio.get_running_loop()
    fields = {
        "model": MODEL,
        "prompt": f"{number} is",
        "max_tokens": 60,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    body = json.dumps(fields).encode()
    while True:
        with await connect(address) as connection:
            first = head("POST", COMPLETIONS, address, len(body), {"x-request-id": f"slow-{number}"})
            await loop.sock_sendall(connection, first + body)
            data = await loop.sock_recv(connection, len(b"HTTP/1.1 429"))
            if data == b"HTTP/1.1 429":  # the others' requests fill the queue
                await asyncio.sleep(0.5)
                continue
            while not is_over.is_set():
                with contextlib.suppress(ConnectionError):
                    data += await loop.sock_recv(connection, 1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_over.wait(), 1.0)
            break
    return data.decode()


async def hold_half_open(address: Address, number: int) -> bytes:
    """Connect and send nothing, or a part of the headers; return what the server sends."""
    loop = asyncio.get_running_loop()
    with await connect(address) as connection:
        if number % 2:
            await loop.sock_sendall(connection, head("POST", CHAT, address, 10, {})[: 1 + number % 60])
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(connection, 1000):
                data += piece
        return data


async def stay_healthy(address: Address, number: int, is_over: asyncio.Event) -> int:
    """Send one request after another, check that each response is whole, and return their number."""
    num_responses = 0
    while not is_over.is_set():
        message = {"role": "user", "content": f"What is {number} and {num_responses}?"}
        response = await post(address, CHAT, {"messages": [message], "max_tokens": 8, "stream": True})
        if response.status == 429:  # the readers' requests fill the queue
            await asyncio.sleep(0.2)
            continue
        assert response.status == 200 and response.is_terminated and response.error is None
        num_responses += 1
    return num_responses


async def run(server: Server, num_readers: int, num_half_open: int, num_fds: int) -> tuple[int, list[bytes], int]:
    """Return the number of healthy responses, the data sent to half-open clients and the server's peak memory."""
    is_over = asyncio.Event()
    address = server.address
    healthy = [asyncio.create_task(stay_healthy(address, number, is_over)) for number in range(NUM_HEALTHY)]
    readers: list[asyncio.Task[str]] = []
    half_open = [asyncio.create_task(hold_half_open(address, number)) for number in range(num_half_open)]
    memory = 0
    for number in range(num_readers):
        readers.append(asyncio.create_task(read_slowly(address, number, is_over)))
        # The queue does not take more at a time.
        if number % 20 == 19:
            await asyncio.to_thread(server.until, lambda: server.metrics()["vllm:num_requests_waiting"] < 15)
            memory = max(memory, Resources.of(server.pid).memory)
    heard = await asyncio.gather(*half_open)
    # The readers would go on for days: only the server can have closed their connections.
    while Resources.of(server.pid).num_fds > num_fds + NUM_HEALTHY:
        memory = max(memory, Resources.of(server.pid).memory)
        await asyncio.sleep(0.1)
    is_over.set()
    began = await asyncio.gather(*readers)
    assert all(one.startswith("HTTP/1.1 200") for one in began)
    return sum(await asyncio.gather(*healthy)), heard, memory


def test_slow_clients_are_disconnected_and_healthy_ones_served(strict_server: Server, is_deep: bool) -> None:
    server = strict_server
    num_readers = NUM_READERS_DEEP if is_deep else NUM_READERS
    num_half_open = NUM_HALF_OPEN_DEEP if is_deep else NUM_HALF_OPEN
    before = Resources.of(server.pid)
    num_responses, heard, memory = asyncio.run(run(server, num_readers, num_half_open, before.num_fds))
    assert num_responses >= NUM_HEALTHY
    assert [bool(one) for one in heard] == [bool(number % 2) for number in range(num_half_open)]
    assert all(one.startswith(b"HTTP/1.1 408 ") for one in heard if one)
    growth = (memory - before.memory) / num_readers
    print(f"{num_responses} healthy responses; {growth / 1024:.0f} KiB of the server's memory per slow reader")
    assert growth < MAX_BYTES_PER_READER
    finished, _ = server.requests_in_log("slow-")
    # Clients that the full queue refused have sent their request again.
    served = [[one for one in found if one.reason != "error"] for found in finished.values()]
    assert len(served) == num_readers and all(len(found) == 1 for found in served)
