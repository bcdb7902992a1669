"""A real server on a real socket, in a thread of its own, over a fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import uvicorn

from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine

MODEL = "org/fake-model"
SETTINGS = ServerSettings(served_model_name=(MODEL,), sse_keep_alive_interval=0.2)


class Server:
    """An address, and the fake engine's client, which tests control."""

    def __init__(self, settings: ServerSettings = SETTINGS) -> None:
        self.engine_client = FakeClient()
        app = build_app(fake_engine(self.engine_client), settings)
        config = uvicorn.Config(app, port=0, http="httptools", lifespan="off", log_config=None, access_log=False)
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._http.serve()))

    def start(self) -> None:
        self._thread.start()
        self.until(lambda: self._http.started)
        port = self._http.servers[0].sockets[0].getsockname()[1]
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._http.should_exit = True
        self._thread.join()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def running_server() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """Yield the server with a fresh engine client; no request may run in it afterwards."""
    client = running_server.engine_client
    client.reset()
    client.is_alive = True
    yield running_server
    client.go_on()
    running_server.until(lambda: not client.running)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
