"""Supervisor: keeps an engine process running, with the interface of EngineClient. Imports no torch.

When the process dies, requests in flight fail at once, and another process is started. When it makes no progress, no
new request is sent to it; after a while it is killed and another process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pagewick.config import EngineConfig
from pagewick.engine.child import ENGINE_MODULE
from pagewick.engine.client import EngineClient, lasting_task
from pagewick.engine.health import EngineHealth, EngineState
from pagewick.engine.messages import EngineRequest, EngineStats
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.open_requests import Take
from pagewick.engine.stats_sums import add_totals
from pagewick.engine.watchdog import HUNG_AFTER_S, LOOK_INTERVAL_S, Watchdog, activity_of
from pagewick.errors import EngineDeadError, InvalidRequestError, ModelLoadError
from pagewick.log import get_logger, one_line

DEFAULT_HANG_TIMEOUT_S = 60.0
# Upper limit of the time that clients are told to wait: the engine may be back sooner than expected.
_MAX_RETRY_AFTER_S = 120
# The time to wait for an engine that hangs, which is unknown.
_HUNG_RETRY_AFTER_S = 10
# Properties of a model that clients or the tokenizer rely on. If one changes, the server must be restarted.
_LASTING = ("architecture", "vocab_size", "eos_token_ids")

_MODEL_FILES = frozenset({".json", ".safetensors", ".jinja", ".model", ".gguf"})

_ADVICE = "it is being restarted: send the request again in some seconds"

_logger = get_logger(__name__)

StartClient = Callable[[], Awaitable[EngineClient]]
AtEachStart = Callable[[EngineConfig], Awaitable[EngineConfig]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a supervisor, in seconds. It restarts an engine at once after a death, then after delays that double.

    hang_timeout_s: time without progress until the engine is restarted; 0 is never. healthy_s: an engine that has lived
    this long is restarted at once again. start_timeout_s: a start has failed if it takes longer than this and ten times
    as long as the one before it.
    """

    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    hung_after_s: float = HUNG_AFTER_S
    look_interval_s: float = LOOK_INTERVAL_S
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    healthy_s: float = 10.0
    start_timeout_s: float = 600.0


class Delays:
    """Computes the delay before the next start; see Timing."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._next_s = 0.0

    def take(self, alive_s: float = 0.0) -> float:
        """Return the seconds until the next start. alive_s: how long the last engine has lived."""
        if alive_s >= self._timing.healthy_s:
            self._next_s = 0.0
        delay_s = self._next_s
        self._next_s = min(max(self._timing.first_delay_s, 2 * delay_s), self._timing.longest_delay_s)
        return delay_s


class Supervisor:
    """An engine process that is restarted whenever it ends. Created by `start`; has the interface of EngineClient.

    info: describes the engine that runs, or ran last. stats: totals include all engines so far, so they never fall.
    on_news: called whenever the requests have got news from the engine, and when `health` or `info` may have changed.
    """

    def __init__(self, client: EngineClient, start_client: StartClient, timing: Timing, *, load_s: float) -> None:
        """load_s: seconds that it took to start the client."""
        self.info: ModelInfo = client.info
        self.on_news: Callable[[], None] = lambda: None
        self._client = client
        client.on_news = self._tell
        self._start_client = start_client
        self._timing = timing
        self._load_s = load_s
        self._past = EngineStats()
        # The adapters that were loaded later than the engine, by name, with their paths; an empty path: unloaded.
        self._changes: dict[str, str] = {}
        self._watchdog = self._new_watchdog()
        self._num_restarts = self._num_failed_starts = 0
        self._delays = Delays(timing)
        self._next_start_at = 0.0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._task = lasting_task(self._supervise())
        self._task.add_done_callback(self._notice_end)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S,
        timing: Timing | None = None,
        module: str = ENGINE_MODULE,
        at_each_start: AtEachStart | None = None,
    ) -> Self:
        """Start an engine process and wait until it has loaded `config.model`, a local directory.

        timing: replaces hang_timeout_s. module: the module that the process runs. at_each_start: changes the config for
        each start. Raises the exceptions of EngineClient.start and at_each_start: a first start that fails is not
        repeated.
        """
        files = _files_of(Path(config.model))

        async def start_client() -> EngineClient:
            if _files_of(Path(config.model)) != files:
                raise ModelLoadError(
                    f"the files of the model in {config.model} have changed since the server started; restart the "
                    "server, or put the old ones back"
                )
            changed = config if at_each_start is None else await at_each_start(config)
            return await EngineClient.start(changed, module=module, advice=_ADVICE)

        started_at = time.monotonic()
        client = await start_client()
        timing = timing or Timing(hang_timeout_s=hang_timeout_s)
        return cls(client, start_client, timing, load_s=time.monotonic() - started_at)

    @property
    def stats(self) -> EngineStats:
        return add_totals(self._past, self._client.stats) if self._num_restarts else self._client.stats

    @property
    def is_alive(self) -> bool:
        return self.health.state == "ready"

    @property
    def health(self) -> EngineHealth:
        state: EngineState = "ready"
        reason, retry_after_s = "", 0.0
        if self._is_closing:
            state, reason = "dead", "the server is shutting down"
        elif self._failure is not None:
            state, reason = "dead", "the supervisor of the engine has failed; restart the server"
        elif self._client.cause is not None:
            state, reason = "restarting", f"{self._client.cause}; it is being restarted"
            if self._num_failed_starts:
                reason = f"the engine could not be restarted yet ({self._num_failed_starts} times); see the log"
            retry_after_s = max(0.0, self._next_start_at - time.monotonic()) + self._load_s
        elif self._watchdog.is_hung:
            state, reason = "hung", f"the engine makes no progress for {self._watchdog.stalled_s:.0f} seconds"
            retry_after_s = _HUNG_RETRY_AFTER_S
        return EngineHealth(
            state,
            reason,
            retry_after_s=min(max(1, math.ceil(retry_after_s)), _MAX_RETRY_AFTER_S),
            num_restarts=self._num_restarts,
            num_failed_starts=self._num_failed_starts,
        )

    def open(self, request: EngineRequest, take: Take) -> Callable[[], None]:
        """As EngineClient.open; raises EngineDeadError at once unless the engine is ready."""
        health = self.health
        if health.state != "ready":
            message = f"{health.reason}; try again in {health.retry_after_s} seconds"
            raise EngineDeadError(message, retry_after_s=health.retry_after_s)
        return self._client.open(request, take)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        """As EngineClient.abort."""
        self._client.abort(request_ids, choices)

    async def change_adapter(self, name: str, path: str = "", *, replaces: bool = False) -> None:
        """As EngineClient.change_adapter; engines that are started later get the same adapters."""
        client = self._client
        await client.change_adapter(name, path, replaces=replaces)
        self._changes[name] = path

    async def close(self) -> None:
        """End the engine process, or the attempt to start one. Requests in flight get an EngineDeadError."""
        self._is_closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._watchdog.is_hung and self._client.is_alive:
            # An engine that hangs does not notice that its connection is closed.
            await self._client.kill("the server is shutting down")
        await self._client.close()

    def _tell(self) -> None:
        self.on_news()

    async def _supervise(self) -> None:
        while True:
            started_at = time.monotonic()
            await self._watch()
            self._next_start_at = time.monotonic() + self._delays.take(time.monotonic() - started_at)
            # Two engines at the same time would not fit into memory.
            await self._client.close()
            self._replace(await self._new_client())

    def _notice_end(self, task: asyncio.Task[None]) -> None:
        """If the supervising task itself has failed, report it through `health`."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            _logger.error("the supervisor of the engine has failed; restart the server", exc_info=failure)
            self._tell()

    async def _watch(self) -> None:
        """Watch the engine until it is gone; kill it if it hangs for too long."""
        timing, client = self._timing, self._client
        while not client.ended.is_set():
            if not self._watchdog.is_owing:
                # An engine without work cannot hang until it is sent a message.
                await client.stirred.wait()
            client.stirred.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timing.look_interval_s):
                    await client.ended.wait()
            was_hung = self._watchdog.is_hung
            self._watchdog.look(time.monotonic(), client.num_sent)
            if self._watchdog.is_hung != was_hung and client.cause is None:
                self._report_hang()
            if self._watchdog.is_hung or was_hung:
                self._tell()
            is_too_long = self._watchdog.stalled_s >= timing.hang_timeout_s > 0
            if self._watchdog.is_hung and is_too_long and client.cause is None:
                await client.kill(f"the engine made no progress for {self._watchdog.stalled_s:.0f} seconds")

    def _report_hang(self) -> None:
        if not self._watchdog.is_hung:
            _logger.warning("the engine makes progress again")
            return
        end = f"; at {self._timing.hang_timeout_s:.0f} it is restarted" if self._timing.hang_timeout_s else ""
        _logger.error("the engine makes no progress for %.0f seconds%s", self._watchdog.stalled_s, end)

    async def _new_client(self) -> EngineClient:
        """Start an engine; repeat until it succeeds."""
        while True:
            await asyncio.sleep(self._next_start_at - time.monotonic())
            started_at = time.monotonic()
            try:
                client = await self._start_in_time(max(self._timing.start_timeout_s, 10 * self._load_s))
                await self._check_same_model(client)
                await self._repeat_changes(client)
            # Any exception: a server must not stay without an engine because of an error that nobody expected.
            except Exception as error:
                self._num_failed_starts += 1
                delay_s = self._delays.take()
                self._next_start_at = time.monotonic() + delay_s
                _logger.error("the engine could not be started, next try in %.1f s: %s", delay_s, one_line(error))
                self._tell()
                continue
            self._load_s = time.monotonic() - started_at
            return client

    async def _start_in_time(self, limit_s: float) -> EngineClient:
        try:
            async with asyncio.timeout(limit_s):
                return await self._start_client()
        except TimeoutError as error:
            raise EngineDeadError(f"the engine was not ready after {limit_s:.0f} seconds") from error

    async def _repeat_changes(self, client: EngineClient) -> None:
        for name, path in self._changes.items():
            try:
                if path or name in client.info.adapters:
                    await client.change_adapter(name, path, replaces=True)
            except (InvalidRequestError, ModelLoadError) as error:
                # All other requests can be served.
                _logger.error("the LoRA adapter %s could not be loaded again: %s", name, one_line(error))

    async def _check_same_model(self, client: EngineClient) -> None:
        changed = [name for name in _LASTING if getattr(client.info, name) != getattr(self.info, name)]
        if changed:
            await client.close()
            raise ModelLoadError(
                f"the model in {client.info.model_path} has changed ({', '.join(changed)} changed); restart the "
                "server, or put the old one back"
            )

    def _replace(self, client: EngineClient) -> None:
        """Use this client from now on."""
        self._past = add_totals(self._past, self._client.stats)
        if client.info.max_model_len != self.info.max_model_len:
            _logger.warning("the context is %d tokens now, not %d", client.info.max_model_len, self.info.max_model_len)
        self._client, self.info = client, client.info
        client.on_news = self._tell
        self._watchdog = self._new_watchdog()
        self._num_restarts += 1
        self._num_failed_starts = 0
        _logger.info("the engine is ready again after %.1f s", self._load_s)
        self._tell()

    def _new_watchdog(self) -> Watchdog:
        child, timing = self._client.child, self._timing
        return Watchdog(
            child.progress.read,
            lambda: activity_of(child.process_ids),
            now=time.monotonic(),
            hung_after_s=timing.hung_after_s,
            longest_elapsed_s=2 * timing.look_interval_s,
        )


def _files_of(model: Path) -> dict[str, tuple[int, int]]:
    """Return the files of a model, or those beside its GGUF file: name -> size in bytes and time of change."""
    directory, suffixes = (model, _MODEL_FILES) if model.is_dir() else (model.parent, {model.suffix})
    found = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.suffix in suffixes and path.is_file():
            status = path.stat()
            found[path.name] = (status.st_size, status.st_mtime_ns)
    return found
