"""`python -m benchmarks.stream_overhead`: processor time of the API process per streamed token.

A server with the text of the built-in model streams to 1 to 512 clients. Its engine has no model: `steady_engine` sends
one token of a text to each request in every step, so slowly that the server should keep up. The result is the processor
time of the server's API process, by its own clock, while all streams run: it includes HTTP and the system calls. The
clients are in this process, do not parse what they read, and report their own processor time. With --engine, the
built-in model generates the tokens as fast as it can, which also gives tokens per second. With --api-server-count, the
result is the processor time of all API processes together, and that of the hub beside it.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import math
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import click
import httpx
import psutil

from benchmarks.server_process import cpu_seconds
from benchmarks.steady_engine import PERIOD_VARIABLE
from pagewick.config import EngineConfig

API_MODULE = "pagewick.server.hub.api_process"
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is a prefix cache?"}]}),
    "completions": ("/v1/completions", {"prompt": "A prefix cache is"}),
}
EVENT = b"data: {"
END = b"[DONE]"
# Events of each stream before and after the measurement, so that all streams run during it.
MARGIN = 16
BUFFER_BYTES = 1 << 16
# Within the context of the built-in model.
MAX_TOKENS = 1900


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of processor time, while `num_tokens` were streamed in `wall_s` seconds as `num_events` events."""

    num_tokens: float
    num_events: int
    wall_s: float
    api_s: float
    hub_s: float
    engine_s: float
    client_s: float

    def row(self, num_streams: int) -> str:
        seconds = (self.api_s, self.hub_s, self.engine_s, self.client_s)
        per_token = (1e6 * one / self.num_tokens for one in seconds)
        rate, joined = self.num_tokens / self.wall_s, self.num_tokens / self.num_events
        return f"{num_streams:11}{rate:12,.0f}{joined:12.2f}" + "".join(f"{one:12.1f}" for one in per_token)


class Streams:
    """Clients of one server, each with a stream."""

    def __init__(self, address: tuple[str, int], num_streams: int, route: str, fields: dict[str, Any]) -> None:
        path, body = ROUTES[route]
        content = json.dumps({**body, **fields, "stream": True, "ignore_eos": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {address[0]}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        self._selector = selectors.DefaultSelector()
        self.counts = [0] * num_streams
        for number in range(num_streams):
            connection = socket.create_connection(address)
            connection.sendall(head + content)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, number)
        self._ends = [b""] * num_streams

    def read_until(self, num_events: int) -> None:
        """Read until each stream has had this number of events, or has ended."""
        left = {n for n, count in enumerate(self.counts) if count < num_events and self._ends[n] != END}
        while left:
            for key, _ in self._selector.select():
                number = key.data
                self._read(key.fileobj, number)
                if self.counts[number] >= num_events or END in self._ends[number]:
                    left.discard(number)

    def _read(self, connection: Any, number: int) -> None:
        data = connection.recv(BUFFER_BYTES)
        if not data:
            raise click.ClickException(f"the server closed a stream too early, after {self._ends[number]!r}")
        data = self._ends[number] + data
        self.counts[number] += data.count(EVENT)
        self._ends[number] = END if END in data else data[-len(EVENT) + 1 :]

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()


def measure(server: psutil.Process, address: tuple[str, int], num_streams: int, route: str, num_events: int) -> Result:
    """Run the streams at the same time, until each has had this number of events between the margins."""
    api_processes = [one for one in server.children() if API_MODULE in one.cmdline()]
    (engine,) = [one for one in server.children() if one not in api_processes]
    hub = [server] if api_processes else []

    def times() -> list[float]:
        groups = (api_processes or [server], hub, [engine])
        return [*(sum(map(cpu_seconds, group)) for group in groups), time.process_time(), time.monotonic()]

    streams = Streams(address, num_streams, route, {"max_tokens": MAX_TOKENS, "seed": 1})
    try:
        streams.read_until(MARGIN)
        num_tokens_before = num_generated(address)
        before = times()
        num_before = sum(streams.counts)
        streams.read_until(MARGIN + num_events)
        api_s, hub_s, engine_s, client_s, wall_s = (b - a for a, b in zip(before, times(), strict=True))
        tokens, events = num_generated(address) - num_tokens_before, sum(streams.counts) - num_before
        return Result(tokens, events, wall_s, api_s, hub_s, engine_s, client_s)
    finally:
        streams.close()
        # The server notices the clients' end before the next measurement begins.
        time.sleep(0.5)


def num_generated(address: tuple[str, int]) -> float:
    """Return how many tokens the engine has generated, as the server knows it."""
    text = httpx.get(f"http://{address[0]}:{address[1]}/metrics", timeout=60).text
    return float(re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)[0])


async def serve(max_num_seqs: int, stream_interval: int) -> None:
    """Serve without a model until this process is ended."""
    from pagewick.api_arguments import load_text
    from pagewick.async_llm import AsyncEngine
    from pagewick.engine.client import EngineClient
    from pagewick.local_models import with_local_models
    from pagewick.server.app import build_app
    from pagewick.server.http_server import HttpServer
    from pagewick.server.settings import ServerSettings

    config = replace(with_local_models(EngineConfig()), max_num_seqs=max_num_seqs)
    tokenizer, template, default_params, _ = load_text(config, None)
    client = await EngineClient.start(config, module="benchmarks.steady_engine")
    engine = AsyncEngine(client, tokenizer, template, default_params=default_params)
    settings = ServerSettings.for_model(log_requests=False, stream_interval=stream_interval)
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server = HttpServer(build_app(engine, settings), settings)
    asyncio.get_running_loop().add_signal_handler(15, server.leave)
    await server.serve(sockets=[listener])
    await engine.close()


async def serve_in_processes(max_num_seqs: int, stream_interval: int, count: int) -> None:
    """Serve with several API processes, without a model, until this process is ended."""
    from pagewick.engine.model_info import ModelInfo
    from pagewick.engine.supervisor import Supervisor, Timing
    from pagewick.local_models import with_local_models
    from pagewick.server.guard.api_keys import ApiKeys
    from pagewick.server.hub.run import Hub
    from pagewick.server.settings import ServerSettings

    async def start_engine(config: EngineConfig, settings: ServerSettings) -> Supervisor:
        # It does not tell that it makes progress.
        timing = Timing(hang_timeout_s=0, hung_after_s=math.inf)
        return await Supervisor.start(config, module="benchmarks.steady_engine", timing=timing)

    def announce(info: ModelInfo, has_chat_template: bool) -> None:
        print(f"ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    config = replace(with_local_models(EngineConfig()), max_num_seqs=max_num_seqs)
    settings = ServerSettings.for_model(log_requests=False, stream_interval=stream_interval, api_server_count=count)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await Hub(config, settings, {}, listener, announce, ApiKeys(settings, {}), None, start_engine).run()


def run_serve(max_num_seqs: int, stream_interval: int, count: int, profile: str | None) -> None:
    import uvloop

    profiler = cProfile.Profile()
    if profile is not None:
        profiler.enable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = (
            serve(max_num_seqs, stream_interval)
            if count == 1
            else serve_in_processes(max_num_seqs, stream_interval, count)
        )
        runner.run(server)
    if profile is not None:
        profiler.dump_stats(profile)


@click.command()
@click.option("--streams", type=click.IntRange(1), multiple=True, default=(1, 16, 64, 256, 512), show_default=True)
@click.option("--route", type=click.Choice([*ROUTES]), default="chat", show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=20000, show_default=True, help="of all streams together")
@click.option("--period-us", default=200.0, show_default=True, help="time of a step for each stream")
@click.option("--engine", is_flag=True, help="let the built-in model generate the tokens")
@click.option("--api-server-count", type=click.IntRange(1), default=1, show_default=True, help="API processes")
@click.option("--stream-interval", type=click.IntRange(1), default=1, show_default=True, help="tokens of an event")
@click.option("--profile", type=click.Path(), help="write the server's profile to this file")
@click.option("--serve", is_flag=True, hidden=True)
def main(
    streams: tuple[int, ...],
    route: str,
    tokens: int,
    period_us: float,
    engine: bool,
    api_server_count: int,
    stream_interval: int,
    profile: str | None,
    serve: bool,
) -> None:
    """Tokens per second, and microseconds of processor time per token, by process."""
    if serve:
        run_serve(max(streams), stream_interval, api_server_count, profile)
        return
    command = [sys.executable, "-m", "benchmarks.stream_overhead", "--serve", "--streams", str(max(streams))]
    command += ["--profile", profile] if profile else []
    if engine:
        command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--no-log-requests"]
        command += ["--max-num-seqs", str(max(streams))]
    command += ["--api-server-count", str(api_server_count), "--stream-interval", str(stream_interval)]
    environment = {**os.environ, PERIOD_VARIABLE: str(period_us)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            found = next(one for line in process.stdout if (one := re.search(r"ready on http://([\d.]+):(\d+)", line)))
            address = (found[1], int(found[2]))
            columns = ("tokens/s", "per event", "API, us", "hub", "engine", "clients")
            click.echo(f"{route:>11}" + "".join(f"{column:>12}" for column in columns))
            for number in streams:
                num_tokens = min(max(tokens // number, 2 * MARGIN), MAX_TOKENS // 2)
                num_events = max(num_tokens // stream_interval, 1)
                click.echo(measure(psutil.Process(process.pid), address, number, route, num_events).row(number))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
