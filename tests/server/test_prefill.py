"""Prompts that another server computes: found on the disk that both share, and computed here whatever goes wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner

from pagewick.cli import cli
from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest, RequestDelta, RequestOptions
from pagewick.errors import ConfigError, DeadlineExceededError
from pagewick.sampling_params import SamplingParams
from pagewick.server.remote_prefill import PrefillingClient, RemotePrefill, check_prefill
from pagewick.server.settings import ServerSettings
from pagewick.server_url import ServerUrl
from tests.conformance.servers import Server
from tests.fake_engine import FakeClient

KEY = "a-key-of-the-other-server"
Answer = Callable[[asyncio.StreamWriter], None]
TEXT = " ".join(f"Fact {number}: candle {number} burns for {number * 7 % 90} minutes." for number in range(40))


@contextmanager
def server(log: Path, disk: Path, *flags: str, key: str = "") -> Iterator[Server]:
    made = Server(log, "--kv-cache-disk", str(disk), "--kv-cache-disk-shared", "--block-size", "16", *flags, key=key)
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "disk"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("other") / "log", disk, "--api-key", KEY, key=KEY) as made:
        yield made


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, disk: Path, other: Server) -> Iterator[Server]:
    flags = ("--prefill-url", f"{other.url}/v1", "--prefill-api-key", KEY, "--prefill-min-tokens", "64")
    with server(tmp_path_factory.mktemp("here") / "log", disk, *flags) as made:
        yield made


def complete(asked: Server, prompt: str, **more: object) -> tuple[str, int]:
    """Return the text, and how many tokens of the prompt were found."""
    with openai.OpenAI(base_url=f"{asked.url}/v1", api_key=asked.key or "none", max_retries=0) as client:
        response = client.completions.create(
            model="pagewick-demo", prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True, **more}
        )
    assert response.usage is not None and response.usage.prompt_tokens_details is not None
    return response.choices[0].text, response.usage.prompt_tokens_details.cached_tokens or 0


def test_the_blocks_of_a_prompt_come_from_the_other_server(here: Server, other: Server) -> None:
    num_tokens = len(here.tokens(TEXT))
    text, num_cached = complete(here, TEXT)
    assert num_tokens - 17 <= num_cached < num_tokens
    assert other.metric("vllm:prompt_tokens_total") >= num_tokens
    # The salt keeps these blocks apart from the first ones. It goes to the other server, too.
    assert complete(here, TEXT, cache_salt="x")[0] == text
    # Nothing is written that this server has computed before; the response goes on from blocks of both.
    again, num_cached = complete(here, TEXT + text)
    assert num_cached > num_tokens and again


def test_streams_and_choices(here: Server) -> None:
    prompt = f"Once more. {TEXT}"
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="pagewick-demo",
            prompt=prompt,
            max_tokens=8,
            n=2,
            seed=4,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert all(texts)


def test_short_prompts_stay_here(here: Server, other: Server) -> None:
    before = other.metric("vllm:prompt_tokens_total")
    assert complete(here, "Pagewick is")[0]
    assert other.metric("vllm:prompt_tokens_total") == before


def test_the_route_counts_what_it_has_computed(other: Server) -> None:
    tokens = other.tokens(f"Twice. {TEXT}")
    body = {"input": [tokens, tokens[:40]], "cache_salt": "route"}
    first = other.http.post("/v1/prefill", json=body).json()
    assert first["object"] == "prefill" and first["model"] == "pagewick-demo"
    assert first["usage"]["prompt_tokens"] == len(tokens) + 40
    second = other.http.post("/v1/prefill", json=body).json()
    assert second["usage"]["cached_tokens"] == (len(tokens) - 1) // 16 * 16 + 32
    wrong = other.http.post("/v1/prefill", json={"input": []})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input"
    assert other.anonymous.post("/v1/prefill", json=body).status_code == 401


def test_without_the_other_server_prompts_are_computed_here(tmp_path: Path, disk: Path) -> None:
    flags = ("--prefill-url", "http://127.0.0.1:9", "--prefill-min-tokens", "64")
    with server(tmp_path / "log", disk, *flags) as alone:
        text, num_cached = complete(alone, TEXT, cache_salt="alone")
        assert text and num_cached == 0
        assert complete(alone, TEXT[5:], cache_salt="alone")[0]
    log = (tmp_path / "log").read_text()
    assert len(re.findall("http://127.0.0.1:9/v1 computes no prompts .Connection refused", log)) == 1


# Without a model


def request_of(num_tokens: int = 100, request_id: str = "r", n: int = 1, **options: object) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[5] * num_tokens,
        params=SamplingParams(max_tokens=3, n=n),
        seed=1,
        options=RequestOptions(**options),  # type: ignore[arg-type]
    )


@asynccontextmanager
async def answering(
    answer: Answer | None,
) -> AsyncIterator[tuple[ServerUrl, list[bytes]]]:
    """A server that answers every request in this way; None: it never does."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.findall(rb"content-length: (\d+)", head)[0])
            received.append(head + await reader.readexactly(length))
            if answer is None:
                await reader.read()
                received.append(b"left")
            else:
                answer(writer)
        finally:
            writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = made.sockets[0].getsockname()[1]
    try:
        yield ServerUrl.parse(f"http://127.0.0.1:{port}"), received
    finally:
        made.close()


def whole(status: str, body: bytes) -> Answer:
    response = b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
    return lambda writer: writer.write(response)


class Recorder(FakeClient):
    """Notes at once what is opened."""

    def open(
        self, request: EngineRequest, take: Callable[[list[RequestDelta] | Exception], None]
    ) -> Callable[[], None]:
        self.opened.append(request.request_id)
        return super().open(request, take)

    def reset(self) -> None:
        super().reset()
        self.opened: list[str] = []


class Inbox:
    """Keeps the news of a request."""

    def __init__(self) -> None:
        self.news: list[list[RequestDelta] | Exception] = []
        self.changed = asyncio.Event()

    def take(self, news: list[RequestDelta] | Exception) -> None:
        self.news.append(news)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @property
    def is_over(self) -> bool:
        last = self.news[-1] if self.news else []
        return isinstance(last, Exception) or any(one.finish_reason for one in last)


@pytest.mark.parametrize(
    ("answer", "is_computed", "pauses"),
    [
        (whole("200 OK", b"{}"), True, False),
        (whole("429 Too Many Requests", b"{}"), False, False),
        (whole("503 Service Unavailable", b"{}"), False, False),
        (whole("404 Not Found", b"no such route"), False, True),
        (whole("200 OK", b"x" * (2**20 + 1)), False, True),
        (lambda writer: writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort"), False, True),
        (lambda writer: writer.write(b"SSH-2.0-OpenSSH_9.9\r\n"), False, True),
        (lambda writer: None, False, True),
    ],
)  # fmt: skip
def test_whatever_the_other_server_says(answer: Answer, is_computed: bool, pauses: bool) -> None:
    async def run() -> None:
        async with answering(answer) as (url, received):
            now = 100.0
            remote = RemotePrefill(url, "key", clock=lambda: now)
            assert await remote.compute(request_of(cache_salt="s", priority=2)) is is_computed
            assert (
                received[0].startswith(b"POST /v1/prefill HTTP/1.1\r\n") and b"authorization: Bearer key" in received[0]
            )
            assert b'"priority": 2' in received[0] and b'"cache_salt": "s"' in received[0]
            assert remote.is_available is not pauses
            now += 11
            assert remote.is_available

    asyncio.run(run())


def test_a_disk_that_is_not_shared_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        client = Recorder()
        async with answering(whole("200 OK", b"{}")) as (url, _):
            through = PrefillingClient(client, RemotePrefill(url), 50)
            for number, num_cached in enumerate([48, 0, 0]):
                client.extras, inbox = {"num_cached_tokens": num_cached}, Inbox()
                through.open(request_of(request_id=f"r{number}"), inbox.take)
                await inbox.until(lambda inbox=inbox: inbox.is_over)
                assert len(caplog.records) == (number > 0)
        assert "has computed a prompt, and --kv-cache-disk has no block of it" in caplog.text

    asyncio.run(run())


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with answering(whole("401 Unauthorized", b"no such key")) as (url, _):
            remote = RemotePrefill(url, "a-secret-key")
            for _ in range(2):
                assert not await remote.compute(request_of())
        assert len(caplog.records) == 1 and "computes no prompts (HTTP 401: no such key)" in caplog.text
        assert "a-secret-key" not in caplog.text

    asyncio.run(run())


def test_a_request_is_served_whatever_happens() -> None:
    async def run() -> None:
        client, inbox = Recorder(), Inbox()
        async with answering(whole("500 Internal Server Error", b"")) as (url, _):
            through = PrefillingClient(client, RemotePrefill(url), 50)
            through.open(request_of(), inbox.take)
            assert client.opened == []
            await inbox.until(lambda: inbox.is_over)
            assert client.opened == ["r"]

    asyncio.run(run())


@pytest.mark.parametrize("end", ["leave", "abort"])
def test_a_client_that_leaves_ends_the_work_there(end: str) -> None:
    async def run() -> None:
        client, inbox = Recorder(), Inbox()
        async with answering(None) as (url, received):
            through = PrefillingClient(client, RemotePrefill(url), 50)
            leave = through.open(request_of(n=2), inbox.take)
            async with asyncio.timeout(20):
                while not received:
                    await asyncio.sleep(0.01)
                leave() if end == "leave" else through.abort(["r"])
                while b"left" not in received:
                    await asyncio.sleep(0.01)
            assert client.opened == []
            if end == "abort":
                (news,) = inbox.news
                assert isinstance(news, list) and [one.finish_reason for one in news] == ["abort", "abort"]
            # The id is free again.
            through.open(request_of(20), inbox.take)
            assert client.opened == ["r"]

    asyncio.run(run())


def test_the_time_that_the_other_server_takes_counts() -> None:
    async def run() -> None:
        client, inbox = Recorder(), Inbox()
        async with answering(None) as (url, _):
            through = PrefillingClient(client, RemotePrefill(url), 50)
            through.open(request_of(timeout_s=0.2), inbox.take)
            await inbox.until(lambda: inbox.is_over)
            assert isinstance(inbox.news[0], DeadlineExceededError) and client.opened == []

    asyncio.run(run())


@pytest.mark.parametrize(
    "given",
    [
        {"images": [object()]},
        {"pooling": "last"},
        {"options": RequestOptions(is_prefill=True)},
        {"prompt_token_ids": [5]},
    ],
)
def test_others_go_to_the_engine_at_once(given: dict[str, object]) -> None:
    async def run() -> None:
        client = Recorder()
        through = PrefillingClient(client, RemotePrefill(ServerUrl.parse("http://127.0.0.1:9")), 50)
        request = request_of()
        for name, value in given.items():
            setattr(request, name, value)
        through.open(request, lambda news: None)
        assert client.opened == ["r"]

    asyncio.run(run())


def test_it_needs_a_shared_disk() -> None:
    settings = ServerSettings(prefill_url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="needs --kv-cache-disk and --kv-cache-disk-shared"):
        check_prefill(EngineConfig(kv_cache_disk="/tmp/x"), settings)
    wrong = CliRunner().invoke(cli, ["serve", "--prefill-url", "nonsense", "--kv-cache-disk", "/x"])
    assert wrong.exit_code == 1 and "'nonsense' is not the URL of a server" in wrong.output
