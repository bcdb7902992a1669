"""The memory that a client costs the server if it does not read its stream of a megabyte, or reads it late."""

from __future__ import annotations

import gc
import json
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pagewick.engine.messages import EngineRequest, RequestDelta, TokenLogprobs
from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine, spell
from tests.server.raw_http import RawServer, read_all, until

MAX_BYTES = 2**20
SETTINGS = ServerSettings(served_model_name=("m",))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "logprobs": True, "top_logprobs": 20},
    COMPLETIONS: {"prompt": "hi", "logprobs": 20},
}


class Client(FakeClient):
    """It generates "abc..." without an end, and has an alternative for each token that a request asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.info = structs.replace(self.info, max_model_len=8192)
        self._letters = spell("".join(chr(ord("a") + number % 26) for number in range(8000)))

    def _token_ids(self, index: int) -> list[int]:
        return self._letters

    def _delta(self, request: EngineRequest, index: int, position: int) -> RequestDelta:
        delta = super()._delta(request, index, position)
        if delta.logprobs is not None:
            # New objects, as they come out of a message.
            numbers = np.float32(-position / 7) - np.arange(request.params.logprobs or 0, dtype=np.float32)
            top = [(300 + position % 50 + rank, number) for rank, number in enumerate(numbers.tolist())]
            delta.logprobs = [TokenLogprobs(delta.token_ids[0], -position / 7, 1, top)]
        return delta


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def server(client: Client) -> Iterator[RawServer]:
    with RawServer(build_app(fake_engine(client), SETTINGS), SETTINGS) as server:
        yield server


def ask(server: RawServer, path: str, **fields: Any) -> socket.socket:
    connection = server.connect(receive_buffer=2304)
    body = json.dumps({**fields, "stream": True, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


# These tokens make a stream of about one megabyte.
@pytest.mark.parametrize(
    ("path", "fields", "num_tokens"),
    [(CHAT, LOGPROBS[CHAT], 600), (COMPLETIONS, LOGPROBS[COMPLETIONS], 1800), (CHAT, {"messages": HELLO}, 4500)],
    ids=["chat with log-probabilities", "completions with log-probabilities", "chat"],
)
def test_a_client_that_reads_late_costs_less_than_its_stream(
    client: Client, server: RawServer, path: str, fields: dict[str, Any], num_tokens: int
) -> None:
    with ask(server, path, **fields, max_tokens=7) as first:  # so that what is made only once is there
        read_all(first)
    until(lambda: len(client.finished) == 1 and not server.connections)
    tracemalloc.start()
    try:
        before = memory()
        with ask(server, path, **fields, max_tokens=num_tokens) as late:
            until(lambda: len(client.finished) == 2)
            waiting = memory() - before
            tracemalloc.reset_peak()
            data = bytearray()
            peak = 0
            while piece := late.recv(2**16):
                peak = max(peak, tracemalloc.get_traced_memory()[1] - before - len(data))
                data += piece
    finally:
        tracemalloc.stop()
    print(f"{waiting / 1024:.0f} KiB wait, {peak / 1024:.0f} KiB while it reads {len(data) / 1024:.0f}")
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert waiting < MAX_BYTES and peak < MAX_BYTES
