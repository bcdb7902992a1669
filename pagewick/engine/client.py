"""EngineClient: the HTTP process's end of the engine. Ids only; imports no torch.

It listens on a Unix socket in a directory of its own (0700), starts the engine process, which connects back, and from
then on sends requests and hands each request its deltas. On the wire a request has a number for a name, so that one
whose id is used again never gets what was meant for an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import structs

from pagewick import errors
from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    Abort,
    Add,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    ModelInfo,
    Outputs,
    Ready,
    RequestDelta,
    Start,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from pagewick.errors import EngineDeadError, EngineError, InvalidRequestError, PagewickError
from pagewick.log import get_logger
from pagewick.parallel.launch import module_command

# How long the engine process may take to end by itself once its connection is closed.
_EXIT_GRACE_S = 5.0
# The same if it first has to write its cache to disk.
_SAVE_GRACE_S = 120.0
# How long its exit status is waited for once the connection has ended by itself.
_STATUS_GRACE_S = 1.0

# What the engine has at the moment; the other fields of EngineStats count what has ever been.
_GAUGES = (
    "num_requests_running", "num_requests_waiting", "num_waiting_tokens", "oldest_wait_s", "num_blocks",
    "num_free_blocks", "num_cached_blocks", "num_referenced_blocks", "num_session_blocks", "num_host_blocks",
    "num_disk_blocks", "num_leaked_blocks", "num_sessions",
)  # fmt: skip

_logger = get_logger(__name__)


class EngineClient:
    """One engine process. Made by `start`; `close` ends the process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: StreamReader,
        writer: StreamWriter,
        info: ModelInfo,
        *,
        exit_grace_s: float = _EXIT_GRACE_S,
    ) -> None:
        self.info = info
        self._exit_grace_s = exit_grace_s
        self.stats = EngineStats(num_blocks=info.num_kv_blocks, num_free_blocks=info.num_kv_blocks)
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._wire_ids: dict[str, str] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: list[EngineRequest] = []
        self._cause_of_death: str | None = None
        self._is_closing = False
        self._receiving = asyncio.create_task(self._receive())

    @classmethod
    async def start(cls, config: EngineConfig) -> Self:
        """Start an engine process and wait until it has loaded `config.model`, a local directory.

        Raises what the engine raised (ConfigError, ModelLoadError, ...), EngineDeadError if it just died.
        """
        directory = Path(tempfile.mkdtemp(prefix="pagewick-"))
        try:
            process, reader, writer = await _spawn(directory / "engine.sock")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        try:
            writer.write(encode_frame(Start(config)))
            message = await _read_message(reader)
            if isinstance(message, Ready):
                grace_s = _EXIT_GRACE_S if config.kv_cache_disk is None else _SAVE_GRACE_S
                return cls(process, reader, writer, message.info, exit_grace_s=grace_s)
            raise _error_from(message)
        except BaseException:
            await _end(process, writer, _EXIT_GRACE_S)
            raise

    @property
    def is_alive(self) -> bool:
        return self._cause_of_death is None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]:
        """The request's deltas, until every choice has had its finish_reason. Leaving the iterator early aborts it.

        What is wrong with a choice stands in its delta. Raises InvalidRequestError for a request that can never be
        served or whose id is in use, EngineDeadError if the engine is gone.
        """
        check_request(request, self.info)
        if request.request_id in self._wire_ids:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        wire_id = str(next(self._numbers))
        waiting = _Waiting(request.params.n, asyncio.Queue())
        self._wire_ids[request.request_id] = wire_id
        self._waiting[wire_id] = waiting
        unfinished = set(range(request.params.n))
        try:
            self._send_soon(structs.replace(request, request_id=wire_id))
            while unfinished:
                delta = await waiting.queue.get()
                if isinstance(delta, EngineDeadError):
                    raise delta
                # What was on its way when the choice was aborted is not wanted any more.
                if delta.choice_index in unfinished:
                    if delta.finish_reason is not None:
                        unfinished.remove(delta.choice_index)
                    yield structs.replace(delta, request_id=request.request_id)
        finally:
            del self._waiting[wire_id], self._wire_ids[request.request_id]
            if unfinished and self.is_alive:
                self._send(Abort([wire_id]))

    async def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        """Stop these requests, and these choices of requests: their last delta has the finish_reason "abort".

        Unknown ids are ignored, and so is everything if the engine is gone.
        """
        wire_ids = [self._wire_ids[one] for one in request_ids if one in self._wire_ids]
        wire_choices = [(self._wire_ids[one], index) for one, index in choices if one in self._wire_ids]
        if not self.is_alive or not (wire_ids or wire_choices):
            return
        self._send(Abort(wire_ids, wire_choices))
        for wire_id in wire_ids:
            self._tell(wire_id, range(self._waiting[wire_id].num_choices))
        for wire_id, index in wire_choices:
            self._tell(wire_id, [index])

    async def close(self) -> None:
        """End the engine process and wait for it. Requests in flight get an EngineDeadError."""
        self._is_closing = True
        await _end(self._process, self._writer, self._exit_grace_s)
        await self._receiving

    def _tell(self, wire_id: str, aborted: Iterable[int]) -> None:
        """Of these choices the engine will say no more."""
        for index in aborted:
            delta = RequestDelta(request_id=wire_id, choice_index=index, finish_reason="abort")
            self._waiting[wire_id].queue.put_nowait(delta)

    def _send_soon(self, request: EngineRequest) -> None:
        """Send it with all others of this turn of the event loop.

        The engine then hears of the prompts of one HTTP request at once, and if it refuses one of them it says so
        before any token of the others.
        """
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(request)

    def _flush(self) -> None:
        requests, self._unsent = self._unsent, []
        if requests and self._cause_of_death is None:
            self._writer.write(encode_frame(Add(requests)))

    def _send(self, message: Abort) -> None:
        self._flush()
        self._writer.write(encode_frame(message))

    async def _receive(self) -> None:
        """Hand out what comes until the connection ends, then fail whoever still waits."""
        cause = "the engine process ended"
        try:
            while True:
                message = await _read_message(self._reader)
                if not isinstance(message, Outputs):
                    cause = str(_error_from(message))
                    break
                self.stats = message.stats
                for delta in message.deltas:
                    if delta.request_id in self._waiting:
                        self._waiting[delta.request_id].queue.put_nowait(delta)
        except _ConnectionEnded:
            cause = await _how_it_ended(self._process)
        except EngineDeadError as error:
            cause = str(error)
        finally:
            self._die(cause)

    def _die(self, cause: str) -> None:
        if not self._is_closing:
            _logger.error("the engine is gone: %s", cause)
        self._cause_of_death = cause
        self.stats = structs.replace(self.stats, **dict.fromkeys(_GAUGES, 0))
        # If it still runs, it ends with its connection.
        self._writer.close()
        for waiting in self._waiting.values():
            waiting.queue.put_nowait(EngineDeadError(cause))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An iterator that waits for deltas."""

    num_choices: int
    queue: asyncio.Queue[RequestDelta | EngineDeadError]


class _ConnectionEnded(EngineDeadError):
    """The engine process closed the connection without a word."""


async def _spawn(socket_path: Path) -> tuple[asyncio.subprocess.Process, StreamReader, StreamWriter]:
    """Start the engine process and wait until it has connected."""
    connected: asyncio.Future[tuple[StreamReader, StreamWriter]] = asyncio.get_running_loop().create_future()

    def on_connect(reader: StreamReader, writer: StreamWriter) -> None:
        if connected.done():
            writer.close()
        else:
            connected.set_result((reader, writer))

    server = await asyncio.start_unix_server(on_connect, path=socket_path)
    socket_path.chmod(0o600)
    # A session of its own: Ctrl-C reaches this process only, which then ends the engine in order.
    process = await asyncio.create_subprocess_exec(
        *module_command(), "pagewick.engine_process", str(socket_path), str(os.getpid()), start_new_session=True
    )
    ended = asyncio.create_task(process.wait())
    try:
        waited: set[asyncio.Future[Any]] = {connected, ended}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            raise EngineDeadError(f"the engine process ended at once, with exit status {process.returncode}")
        return process, *connected.result()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        ended.cancel()
        # Not wait_closed(): it would wait for the one connection that is to stay.
        server.close()


async def _read_message(reader: StreamReader) -> FromEngine:
    """The next message. Raises _ConnectionEnded, or EngineDeadError for what is no message."""
    try:
        header = await reader.readexactly(FRAME_HEADER_BYTES)
        return decode_from_engine(await reader.readexactly(frame_length(header)))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise _ConnectionEnded("the engine process ended unexpectedly; its last words are in the log") from error
    except (msgspec.DecodeError, ValueError) as error:
        message = f"the engine process sent something that is no message ({error}); restart the server"
        raise EngineDeadError(message) from error


async def _how_it_ended(process: asyncio.subprocess.Process) -> str:
    """Why the connection ended, as far as the exit status tells it."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _STATUS_GRACE_S)
    status = process.returncode
    if status == -signal.SIGKILL:
        return "the engine process was killed, by hand or because the machine has no memory left; restart the server"
    how = "" if status is None else f" with exit status {status}"
    return f"the engine process ended unexpectedly{how}; its last words are in the log"


async def _end(process: asyncio.subprocess.Process, writer: StreamWriter, grace_s: float) -> None:
    """Close the connection, which tells the engine to stop; kill it if it does not."""
    writer.close()
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _error_from(message: FromEngine) -> PagewickError:
    """The exception that the engine process reported, in its own class."""
    assert isinstance(message, Failed), "the engine process broke the protocol"
    kind: type[PagewickError] = getattr(errors, message.kind, EngineError)
    return kind(message.message)
