"""Lets another server compute long prompts: this one then finds their blocks on the disk that both share.

The other server runs its prompts without delaying the responses here. Whatever goes wrong with it costs time only: a
prompt whose blocks are not found is computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import httptools
from msgspec import structs

from pagewick.config import EngineConfig
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ConfigError, DeadlineExceededError
from pagewick.generation import Client
from pagewick.log import get_logger
from pagewick.server.settings import ServerSettings
from pagewick.server_url import ServerUrl

_logger = get_logger(__name__)

# Seconds in which prompts are computed here, after the other server has failed.
_PAUSE_S: Final = 10.0
# Limits of a single prefill, which for a long prompt on a CPU takes minutes, and of its response.
_TIMEOUT_S: Final = 600.0
_CONNECT_TIMEOUT_S: Final = 5.0
_MAX_RESPONSE_BYTES: Final = 2**20
# Statuses of a server that has too much to do, which is no reason not to ask it the next time.
_BUSY: Final = (429, 503)

Take = Callable[[list[RequestDelta] | Exception], None]


class RemotePrefill:
    """The server that computes prompts. clock: for tests."""

    def __init__(
        self, url: ServerUrl, api_key: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._api_key = api_key
        self._clock = clock
        self._tls = url.tls()
        self._paused_until = 0.0
        self._has_failed = self._has_warned_of_misses = False

    @property
    def is_available(self) -> bool:
        return self._clock() >= self._paused_until

    async def compute(self, request: EngineRequest) -> bool:
        """Let the server compute a request's prompt; return whether it has. Never raises an error of the server."""
        options = request.options
        body: dict[str, Any] = {"input": request.prompt_token_ids, "priority": max(0, options.priority)}
        if request.adapter:
            body["model"] = request.adapter
        if options.cache_salt:
            body["cache_salt"] = options.cache_salt
        try:
            async with asyncio.timeout(options.timeout_s or _TIMEOUT_S):
                status, content = await self._post("/prefill", json.dumps(body).encode())
        except (OSError, EOFError, httptools.HttpParserError) as error:
            # TimeoutError is an OSError.
            self._fail(getattr(error, "strerror", None) or str(error) or type(error).__name__)
            return False
        if status in _BUSY:
            return False
        if status != 200:
            self._fail(f"HTTP {status}: {content[:300].decode('utf-8', 'replace')}")
            return False
        if self._has_failed:
            self._has_failed = False
            _logger.info("%s computes prompts again", self._url)
        return True

    def note_miss(self) -> None:
        """Warn, once, that blocks of a prompt were not found that the server has computed."""
        if not self._has_warned_of_misses:
            self._has_warned_of_misses = True
            _logger.warning(
                "%s has computed a prompt, and --kv-cache-disk has no block of it: both servers need the same "
                "directory with --kv-cache-disk-shared, model, flags of the model and of the KV cache, kernels and "
                "versions; until then all prompts are computed twice",
                self._url,
            )

    def _fail(self, reason: str) -> None:
        self._paused_until = self._clock() + _PAUSE_S
        if not self._has_failed:
            self._has_failed = True
            _logger.warning("%s computes no prompts (%s); they are computed here until it does", self._url, reason)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body. Raises OSError, EOFError and HttpParserError."""
        url = self._url
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            if url.socket_path is not None:
                reader, writer = await asyncio.open_unix_connection(url.socket_path)
            else:
                reader, writer = await asyncio.open_connection(url.host, url.port, ssl=self._tls)
        try:
            headers = {
                "host": url.host_header, "connection": "close", "content-type": "application/json",
                "content-length": str(len(body)),
                **({"authorization": f"Bearer {self._api_key}"} if self._api_key else {}),
            }  # fmt: skip
            lines = [f"POST {url.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
            response = _Response()
            while not response.is_complete:
                received = await reader.read(2**16)
                if not received:
                    raise EOFError("it closed the connection")
                response.feed(received)
            return response.status, bytes(response.body)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class _Response:
    """One response, as httptools reads it."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.is_complete = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, received: bytes) -> None:
        self._parser.feed_data(received)

    def on_body(self, part: bytes) -> None:
        self.body += part
        if len(self.body) > _MAX_RESPONSE_BYTES:
            raise EOFError("its response is too long")

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.is_complete = True


class PrefillingClient:
    """A Client whose long prompts another server computes first. min_tokens: the length of those.

    Prompts with images are computed here, and so are those whose log-probabilities are wanted.
    """

    def __init__(self, client: Client, remote: RemotePrefill, min_tokens: int) -> None:
        self._client = client
        self._remote = remote
        self._min_tokens = min_tokens
        self._waiting: dict[str, _WaitingRequest] = {}

    @property
    def info(self) -> ModelInfo:
        return self._client.info

    @property
    def stats(self) -> EngineStats:
        return self._client.stats

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    @property
    def health(self) -> EngineHealth:
        return self._client.health

    def open(self, request: EngineRequest, take: Take) -> Callable[[], None]:
        """As EngineClient.open, after the other server has computed the prompt."""
        if not (self._is_for_remote(request) and self.is_alive and request.request_id not in self._waiting):
            return self._client.open(request, take)
        waiting = _WaitingRequest(self._client, self._remote, request, take)
        self._waiting[request.request_id] = waiting
        waiting.task.add_done_callback(lambda _: self._waiting.pop(request.request_id, None))
        return waiting.leave

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        """As EngineClient.abort. A request that waits for the other server has no choices yet that could be stopped."""
        waiting = [one for one in request_ids if one in self._waiting]
        for request_id in waiting:
            self._waiting[request_id].abort()
        others = [one for one in request_ids if one not in waiting]
        if others or choices:
            self._client.abort(others, choices)

    async def change_adapter(self, name: str, path: str = "", *, replaces: bool = False) -> None:
        await self._client.change_adapter(name, path, replaces=replaces)

    async def close(self) -> None:
        await self._client.close()

    def _is_for_remote(self, request: EngineRequest) -> bool:
        is_plain = not (request.images or request.pooling or request.options.is_prefill)
        is_long = len(request.prompt_token_ids) >= self._min_tokens
        return is_long and is_plain and request.params.prompt_logprobs is None and self._remote.is_available


class _WaitingRequest:
    """A request whose prompt another server computes. It is opened when that has ended, in whatever way."""

    def __init__(self, client: Client, remote: RemotePrefill, request: EngineRequest, take: Take) -> None:
        self._client = client
        self._remote = remote
        self._request = request
        self._take = take
        self._leave: Callable[[], None] | None = None
        self._awaits_first_delta = False
        self.task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """End the request, which the caller does not want any more."""
        if self._leave is not None:
            self._leave()
        else:
            self.task.cancel()

    def abort(self) -> None:
        """End the request before it has reached the engine."""
        self.task.cancel()
        request = self._request
        self._take(
            [
                RequestDelta(request_id=request.request_id, choice_index=index, finish_reason="abort")
                for index in range(request.params.n)
            ]
        )

    async def _run(self) -> None:
        began = time.monotonic()
        self._awaits_first_delta = await self._remote.compute(self._request)
        request = self._request
        if (timeout_s := request.options.timeout_s) is not None:
            left_s = timeout_s - (time.monotonic() - began)
            if left_s <= 0:
                message = f"the request was not finished within its timeout of {timeout_s:g} s"
                self._take(DeadlineExceededError(message))
                return
            request = structs.replace(request, options=structs.replace(request.options, timeout_s=left_s))
        try:
            self._leave = self._client.open(request, self._observe)
        # The caller's request gets every error.
        except Exception as error:
            self._take(error)

    def _observe(self, news: list[RequestDelta] | Exception) -> None:
        if self._awaits_first_delta and not isinstance(news, Exception):
            self._awaits_first_delta = False
            # Blocks that another request has computed here in the meantime count as well.
            if news[0].error is None and news[0].token_ids and not news[0].num_cached_tokens:
                self._remote.note_miss()
        self._take(news)


def check_prefill(config: EngineConfig, settings: ServerSettings) -> None:
    """Raise ConfigError for a server that could not find what another one has computed."""
    if settings.prefill_url is None:
        return
    ServerUrl.parse(settings.prefill_url, "--prefill-url")
    if not config.kv_cache_disk_shared:
        raise ConfigError(
            "--prefill-url needs --kv-cache-disk and --kv-cache-disk-shared here and on the other server: the blocks "
            "of prompts come through this directory"
        )
