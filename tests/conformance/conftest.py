"""Two servers for all tests, and the official client in its four modes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.conformance.callers import Caller, Way
from tests.conformance.servers import MODEL, SECOND_NAME, Server

KEY = "sk-conformance-first"
OTHER_KEY = "sk-conformance-second"
ORIGIN = "https://app.example"


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Both servers, started at the same time."""
    folder = tmp_path_factory.mktemp("conformance")
    keys = folder / "keys"
    keys.write_text(f"first:{KEY}\nsecond:{OTHER_KEY}\n", encoding="utf-8")
    keys.chmod(0o600)
    names = ("--served-model-name", MODEL, "--served-model-name", SECOND_NAME)
    limits = ("--max-num-seqs", "1", "--max-waiting-requests", "1", "--max-body-size", "64KiB")
    rules = ("--api-key-file", str(keys), "--strict", "--allowed-origins", ORIGIN, "--sse-keep-alive-interval", "0.2")
    both = (Server(folder / "open.log", *names), Server(folder / "guarded.log", *limits, *rules, key=KEY))
    try:
        for server in both:
            server.wait_until_ready()
        yield both
    finally:
        for server in both:
            server.stop()


@pytest.fixture
def server(servers: tuple[Server, Server]) -> Server:
    """The server that anybody may use."""
    return servers[0]


@pytest.fixture
def guarded(servers: tuple[Server, Server]) -> Server:
    """The strict server: API keys, one allowed origin, one running and one waiting request, bodies of up to 64 KiB."""
    return servers[1]


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def callers(servers: tuple[Server, Server], runner: asyncio.Runner) -> Iterator[dict[str, Caller]]:
    url = servers[0].url
    made = {"sync": Caller(url, None), "async": Caller(url, runner)}
    yield made
    for caller in made.values():
        caller.close()


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest, callers: dict[str, Caller]) -> Caller:
    return callers[request.param]


@pytest.fixture(params=["sync", "sync streamed", "async", "async streamed"])
def way(request: pytest.FixtureRequest, callers: dict[str, Caller]) -> Way:
    kind, _, streamed = request.param.partition(" ")
    return Way(callers[kind], bool(streamed))


@pytest.fixture(params=["sync", "async"])
def new_caller(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[Callable[..., Caller]]:
    """A function that makes clients for other servers and with other settings."""
    made: list[Caller] = []

    def make(url: str, *, key: str = "none", max_retries: int = 0) -> Caller:
        made.append(Caller(url, runner if request.param == "async" else None, key=key, max_retries=max_retries))
        return made[-1]

    yield make
    for caller in made:
        caller.close()
