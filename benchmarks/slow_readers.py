"""`python -m benchmarks.slow_readers`: latency of healthy clients beside clients that read a byte a second or stall.

There is one server, with timeouts so long that it disconnects nobody while it is measured. In every round healthy
clients send requests alone; then the slow clients connect, from a process of their own, and once the server has
generated their responses, the healthy clients send the same number of requests again. Only values of the same round are
compared, since a machine's speed changes; the first round is not counted, since a server becomes faster with its first
thousand requests. The ratio is the median of the rounds' ratios, for a round's median latency and its 99th percentile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from pagewick.cli.random_model import bench_cache_dir

Address = tuple[str, int]

HEALTHY = {"prompt": "The port is", "max_tokens": 8, "ignore_eos": True, "stream": True, "temperature": 0}
# Some 200 KB: far more than the kernel takes from the server for a client with so small a buffer.
SLOW = {"prompt": "The port is", "max_tokens": 60, "ignore_eos": True, "stream": True, "logprobs": 20}
RECEIVE_BUFFER = 2304
NO_CUT = ("--header-timeout", "3600", "--write-timeout", "3600", "--max-connections", "8192")
IDLE_S = 600.0


def start_server() -> tuple[subprocess.Popen[str], Address]:
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--no-log-requests", *NO_CUT]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    found = next(match for line in server.stdout if (match := re.search(r"ready on http://([\d.]+):(\d+)", line)))
    return server, (found[1], int(found[2]))


def head(address: Address, num_bytes: int) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nhost: {address[0]}\r\ncontent-length: {num_bytes}\r\n\r\n".encode()


async def connect(address: Address) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return connection


async def be_slow(address: Address, num_readers: int, num_half_open: int) -> None:
    """Hold slow and half-open connections until this process is killed."""
    loop = asyncio.get_running_loop()
    held = [await connect(address) for _ in range(num_half_open)]
    for number, connection in enumerate(held):
        if number % 2:
            await loop.sock_sendall(connection, head(address, 10)[:40])
    body = json.dumps(SLOW).encode()

    async def read() -> None:
        connection = await connect(address)
        await loop.sock_sendall(connection, head(address, len(body)) + body)
        while await loop.sock_recv(connection, 1):
            await asyncio.sleep(1)

    await asyncio.gather(*(read() for _ in range(num_readers)))


async def ask(address: Address, num_clients: int, num_requests: int) -> list[float]:
    """Return the seconds that each request of the healthy clients took."""
    seconds: list[float] = []
    body = json.dumps(HEALTHY).encode()
    numbers = iter(range(num_requests))

    async def client() -> None:
        for _ in numbers:
            begun = time.perf_counter()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head(address, len(body)) + body)
            response = await reader.readuntil(b"data: [DONE]")
            if not response.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server responded {response[:200]!r}")
            writer.close()
            seconds.append(time.perf_counter() - begun)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return seconds


def wait_until_idle(address: Address) -> None:
    deadline = time.monotonic() + IDLE_S
    while True:
        text = httpx.get(f"http://{address[0]}:{address[1]}/metrics", timeout=IDLE_S).text
        counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\S* (\S+)$", text, re.MULTILINE)
        if not any(map(float, counts)):
            return
        if time.monotonic() > deadline:
            raise click.ClickException("the server is still busy with the slow readers")
        time.sleep(0.5)


def memory_of(process: psutil.Process) -> int:
    """Return the bytes of memory that only this process uses."""
    return int(process.memory_full_info().uss)


def measure(address: Address, server: psutil.Process, counts: dict[str, int]) -> dict[str, float]:
    """Run one round; return latencies alone and beside the slow clients, and the server's memory per slow client."""

    def percentiles() -> tuple[float, float]:
        seconds = sorted(asyncio.run(ask(address, counts["clients"], counts["requests"])))
        return statistics.median(seconds), seconds[int(0.99 * len(seconds))]

    median_alone, p99_alone = percentiles()
    memory = memory_of(server)
    command = [sys.executable, "-m", "benchmarks.slow_readers", "--slow", f"{address[0]}:{address[1]}"]
    command += ["--readers", str(counts["readers"]), "--half-open", str(counts["half_open"])]
    slow = subprocess.Popen(command)
    try:
        while len(server.net_connections()) < counts["readers"] + counts["half_open"]:
            time.sleep(0.5)
        wait_until_idle(address)
        growth = memory_of(server) - memory
        median_beside, p99_beside = percentiles()
    finally:
        slow.kill()
        slow.wait()
    # Their connections are closed before the next round begins.
    while len(server.net_connections()) > counts["clients"]:
        time.sleep(0.5)
    return {
        "median_alone_s": median_alone, "median_beside_s": median_beside, "p99_alone_s": p99_alone,
        "p99_beside_s": p99_beside, "bytes_per_slow_client": growth / (counts["readers"] + counts["half_open"]),
    }  # fmt: skip


def ratios_of(rounds: list[dict[str, float]], name: str) -> list[float]:
    return [one[f"{name}_beside_s"] / one[f"{name}_alone_s"] for one in rounds]


@click.command()
@click.option("--readers", type=click.IntRange(1), default=500, show_default=True)
@click.option("--half-open", type=click.IntRange(0), default=1000, show_default=True)
@click.option("--clients", type=click.IntRange(1), default=4, show_default=True, help="Healthy clients.")
@click.option(
    "--requests", type=click.IntRange(100), default=1000, show_default=True, help="Healthy requests, each time."
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
@click.option("--slow", hidden=True)
def main(
    readers: int, half_open: int, clients: int, requests: int, repeats: int, output: Path | None, slow: str | None
) -> None:
    """Measure healthy clients' latency with and without slow readers and half-open connections."""
    if slow is not None:
        host, _, port = slow.rpartition(":")
        with contextlib.suppress(ConnectionError):
            asyncio.run(be_slow((host, int(port)), readers, half_open))
        return
    counts = {"readers": readers, "half_open": half_open, "clients": clients, "requests": requests}
    process, address = start_server()
    try:
        measure(address, psutil.Process(process.pid), counts)  # the warm-up is not counted
        rounds = []
        for _ in range(repeats):
            rounds.append(measure(address, psutil.Process(process.pid), counts))
            click.echo(", ".join(f"{name} {value:.4g}" for name, value in rounds[-1].items()))
    finally:
        process.terminate()
        process.wait()
    result: dict[str, Any] = {**counts, "load_average": psutil.getloadavg(), "rounds": rounds}
    for name in ("median", "p99"):
        ratios = result[f"{name}_ratios"] = ratios_of(rounds, name)
        click.echo(
            f"{name} of a healthy request beside {readers} slow readers and {half_open} half-open connections: "
            f"{statistics.median(ratios):.2f} x (from {min(ratios):.2f} to {max(ratios):.2f})"
        )
    largest = max(one["bytes_per_slow_client"] for one in rounds)
    click.echo(f"the server's memory: {largest / 1024:.0f} KiB for each slow client at most")
    output = output or bench_cache_dir() / "slow-readers.json"
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    click.echo(f"result: {output}")


if __name__ == "__main__":
    main()
