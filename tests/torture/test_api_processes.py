"""Several API processes: they share a port, an engine, limits, keys, sessions and metrics, and one may be killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.torture.serving import CHAT, DEADLINE_S, MODEL, Server

COUNT = 2
MAX_CONNECTIONS = 16
KEY, NEW_KEY = "first-key-of-a-client", "second-key-of-a-client"
LONG = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
_ids = itertools.count()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.touch(0o600)
    file.write_text(KEY)
    return file


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Server]:
    """A server with two API processes, for all tests of this file in turn; the last one ends it."""
    server = Server(
        tmp_path_factory.mktemp("hub"),
        *("--api-server-count", str(COUNT), "--num-kv-blocks", "256", "--shutdown-timeout", "1"),
        *("--max-connections", str(MAX_CONNECTIONS), "--api-key-file", str(key_file)),
        *("--hang-timeout", "3"),
    )
    try:
        server.wait_until_ready()
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server
    finally:
        server.let_go()


class Client(httpx.Client):
    """One connection, and with it one API process. process: its number, by the log."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            base_url=server.url,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=DEADLINE_S,
            limits=httpx.Limits(max_connections=1),
        )
        request_id = f"which-{next(_ids)}"
        self.ask("hi", headers={"x-request-id": request_id})
        self.process = next(one["api_process"] for one in server.records() if one.get("request_id") == request_id)

    def ask(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
        response = self.post(CHAT, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return dict(response.json())


def one_of_each(server: Server) -> list[Client]:
    """Return a client of each API process, by its number."""
    found: dict[int, Client] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < COUNT:
        assert time.monotonic() < deadline, f"only {sorted(found)} answer"
        client = Client(server)
        if client.process in found:
            client.close()
        else:
            found[client.process] = client
    return [found[number] for number in range(COUNT)]


@pytest.fixture
def clients(hub: Server) -> Iterator[list[Client]]:
    clients = one_of_each(hub)
    yield clients
    for client in clients:
        client.close()


async def stream(server: Server, request_id: str, **fields: Any) -> str:
    """Return how a stream ends: its finish reason, or the error's message or class."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S
    ) as client:
        try:
            events = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": request_id}],
                stream=True,
                extra_headers={"x-request-id": request_id},
                **fields,
            )
            reasons = [event.choices[0].finish_reason async for event in events]
        except openai.APIStatusError as error:
            return f"{error.status_code}: {error.message}"
        except (openai.APIError, httpx.TransportError) as error:
            return str(error) or type(error).__name__
    return str(reasons[-1])


def processes_of(server: Server, prefix: str) -> set[int]:
    """Return the numbers of the API processes that finished requests with ids that begin so."""
    return {one["api_process"] for one in server.records() if str(one.get("request_id", "")).startswith(prefix)}


def test_streams_of_many_clients_land_on_all_processes_and_metrics_are_sums(hub: Server) -> None:
    async def run() -> list[str]:
        return await asyncio.gather(
            *(stream(hub, f"many-{number}", max_tokens=24, extra_body={"ignore_eos": True}) for number in range(12))
        )

    for _ in range(20):
        before = hub.wait_until_idle()
        assert asyncio.run(run()) == ["length"] * 12
        found = hub.wait_until_idle()
        assert found.accepted - before.accepted == 12
        assert found.finished["length"] - before.finished["length"] == 12
        name = "vllm:request_generation_tokens_sum"
        assert found[name] - before[name] == 12 * 24
        assert found["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 12 * 24
        if processes_of(hub, "many-") == set(range(COUNT)):
            return
    raise AssertionError("one process got all streams")


def test_the_log_says_which_process_a_line_is_of(hub: Server, clients: list[Client]) -> None:
    assert [client.process for client in clients] == list(range(COUNT))
    assert len(hub.api_processes()) == COUNT
    assert any("api_process" not in record for record in hub.records())  # the hub's and the engine's


def test_a_session_goes_on_in_another_process(hub: Server, clients: list[Client]) -> None:
    one, other = clients
    fields = {"session_id": "s", "record_conversation": True}
    answers = [client.ask(f"{number}", **fields) for number, client in enumerate((one, other, one))]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    messages = other.get("/v1/sessions/s").json()["messages"]
    assert [message["content"] for message in messages] == ["0", texts[0], "1", texts[1], "2", texts[2]]
    body = {"messages": [{"role": "user", "content": "long"}], **fields, "ignore_eos": True, "stream": True}
    with one.stream("POST", CHAT, json=body) as running:
        lines = running.iter_lines()
        next(lines)
        refused = other.post(CHAT, json={"messages": messages[:1], **fields})
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "session_busy"
        lines.close()
    # The client has left, so that nothing of its request is kept.
    hub.wait_until_idle()
    assert other.get("/v1/sessions/s").json()["messages"] == messages
    assert other.delete("/v1/sessions/s").status_code == 200
    assert one.get("/v1/sessions/s").status_code == 404


def test_a_stored_response_goes_on_in_another_process(clients: list[Client]) -> None:
    one, other = clients
    fields = {"temperature": 0, "max_output_tokens": 8}
    first = one.post("/v1/responses", json={"input": "hello", **fields}).json()
    body = {"input": "and?", "previous_response_id": first["id"], **fields}
    second = other.post("/v1/responses", json=body).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert one.get(f"/v1/responses/{second['id']}").json() == second
    assert one.delete(f"/v1/responses/{second['id']}").status_code == 200
    assert other.get(f"/v1/responses/{second['id']}").status_code == 404


def test_the_limit_of_connections_holds_for_all_processes_together(hub: Server, clients: list[Client]) -> None:
    hub.metrics()
    num_open = 1 + len(clients)
    connections = [socket.create_connection(hub.address) for _ in range(MAX_CONNECTIONS + 4 - num_open)]
    try:
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        statuses = sorted(connection.recv(4096).split()[1] for connection in connections)
        assert statuses == [b"200"] * (MAX_CONNECTIONS - num_open) + [b"503"] * 4
    finally:
        for connection in connections:
            connection.close()

    def is_open_again() -> bool:
        with httpx.Client(base_url=hub.url, timeout=DEADLINE_S) as client:
            return client.get("/health").status_code == 200

    hub.until(is_open_again)


def test_all_processes_read_new_keys(hub: Server, clients: list[Client], key_file: Path) -> None:
    key_file.write_text(f"{KEY}\n{NEW_KEY}\n")
    hub.process.send_signal(signal.SIGHUP)
    headers = {"authorization": f"Bearer {NEW_KEY}"}
    hub.until(lambda: all(client.get("/v1/models", headers=headers).status_code == 200 for client in clients))
    key_file.write_text("short")
    hub.process.send_signal(signal.SIGHUP)
    hub.until(lambda: any("the API keys stay as they are" in trouble for trouble in hub.troubles()))
    assert [client.get("/v1/models", headers=headers).status_code for client in clients] == [200] * COUNT


@pytest.mark.parametrize(("number", "end"), [(signal.SIGKILL, "was killed"), (signal.SIGSTOP, "did not respond for")])
def test_a_process_that_dies_or_hangs_loses_its_own_streams_only_and_is_started_again(
    hub: Server, clients: list[Client], number: int, end: str
) -> None:
    session = {"session_id": f"k{number}", "record_conversation": True}
    clients[1].ask("before", **session)
    # The process that the test before has killed lost a request, which has ended, too.
    before = hub.wait_until_idle()
    victim = next(one for one in hub.api_processes() if one.cmdline()[-2] == "0")

    def body(**fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "go"}], "stream": True, "ignore_eos": True, **fields}

    with (
        clients[0].stream("POST", CHAT, json=body(max_tokens=1900, **session)) as lost,
        clients[1].stream("POST", CHAT, json=body(max_tokens=400)) as kept,
    ):
        lost_lines, kept_lines = lost.iter_lines(), kept.iter_lines()
        next(lost_lines), next(kept_lines)
        hub.metrics()  # so that the process has reported the request that is lost
        victim.send_signal(number)
        with pytest.raises(httpx.TransportError):
            list(lost_lines)
        assert list(kept_lines)[-2:] == ["data: [DONE]", ""]
        # The other process answers meanwhile; the request that was lost leaves the engine.
    after = hub.wait_until_idle()
    assert after.finished["error"] >= before.finished["error"] + 1
    num_generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    # The engine may finish a response before the hang of its API process is noticed.
    assert num_generated < 400 + 1900 or number == signal.SIGSTOP
    assert after.accepted >= before.accepted + 1
    for client in clients:
        client.close()
    clients[:] = one_of_each(hub)
    # The session was busy for the process that is gone; it is as it was before.
    assert clients[0].ask("again", **session)
    assert [message["content"] for message in clients[1].get(f"/v1/sessions/k{number}").json()["messages"]][::2] == [
        "before",
        "again",
    ]
    (trouble,) = (trouble for trouble in hub.troubles() if f"API process 0 {end}" in trouble)
    assert "are lost: 1" in trouble or number == signal.SIGSTOP, trouble


def test_all_processes_tell_that_the_engine_is_gone_and_serve_with_the_next(hub: Server, clients: list[Client]) -> None:
    async def run() -> list[str]:
        streams = [asyncio.create_task(stream(hub, f"dead-{number}", **LONG)) for number in range(6)]
        await asyncio.sleep(0.5)
        hub.engine().kill()
        return await asyncio.gather(*streams)

    assert all("engine" in end for end in asyncio.run(run()))
    for client in clients:
        hub.until(lambda client=client: client.get("/health").status_code == 200)  # type: ignore[misc]
        assert client.ask("hi")["choices"]
    assert hub.metrics()["pagewick:engine_restarts_total"] == 1


async def is_healthy(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        # A process that has nothing left to drain may end before it answers.
        return False


def test_sigterm_drains_all_processes(hub: Server) -> None:
    children = hub.children()
    assert len(children) == COUNT + 1

    async def run() -> list[str]:
        short = [
            asyncio.create_task(stream(hub, f"short-{number}", max_tokens=16, extra_body={"ignore_eos": True}))
            for number in range(4)
        ]
        long = [asyncio.create_task(stream(hub, f"long-{number}", **LONG)) for number in range(4)]
        async with httpx.AsyncClient(base_url=hub.url, timeout=DEADLINE_S) as http:
            await asyncio.gather(*short)
            hub.process.send_signal(signal.SIGTERM)
            while await is_healthy(http):
                await asyncio.sleep(0.01)
        late = await stream(hub, "late", max_tokens=1)
        assert late.startswith("503") or "onnection" in late, late
        return [*(task.result() for task in short), *await asyncio.gather(*long)]

    ends = asyncio.run(run())
    assert ends[:4] == ["length"] * 4
    assert all(end == "length" or "shutting down" in end for end in ends[4:]), ends
    assert hub.process.wait(DEADLINE_S) == 0
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert list(hub.temporary.iterdir()) == []


def test_everything_ends_with_the_hub(tmp_path: Path) -> None:
    server = Server(tmp_path, "--api-server-count", str(COUNT))
    try:
        server.until(lambda: len(server.children()) == COUNT + 1)
        children = server.children()
        os.kill(server.pid, signal.SIGKILL)
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []
    finally:
        server.let_go()


def test_what_an_api_process_cannot_load_is_an_error_of_the_command() -> None:
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--api-server-count", str(COUNT)]
    result = subprocess.run(
        [*command, "--otlp-endpoint", "nonsense"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.returncode != 0
    assert "--otlp-endpoint must be an address" in result.stderr and "Traceback" not in result.stderr
    assert "ready" not in result.stdout
