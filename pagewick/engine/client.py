"""EngineClient: the side of the engine that lives in the HTTP process. It handles ids only and imports no torch.

It starts an engine process and talks to it over a socket pair that no other process can reach: it sends requests and
passes each request its deltas.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self

import msgspec

from pagewick import errors
from pagewick.config import EngineConfig
from pagewick.engine.admission import check_request
from pagewick.engine.child import ENGINE_MODULE, EngineChild
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    Abort,
    AdapterChanged,
    Add,
    ChangeAdapter,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    RequestDelta,
    Start,
    decode_from_engine,
    encode_frame,
    frame_length,
    take_frames,
)
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.open_requests import OpenRequests, Take
from pagewick.engine.stats_sums import without_gauges
from pagewick.errors import EngineDeadError, EngineError, PagewickError
from pagewick.log import get_logger

# Seconds for the engine process to end by itself once its connection is closed. It has nothing to save, and a server
# that shuts down must not wait for the step of a long prompt.
_EXIT_GRACE_S = 0.5
# Seconds to end if it first has to write its cache to disk.
_SAVE_GRACE_S = 120.0

# Upper limit of what is read at once: messages that have gathered are handled together.
_READ_BYTES = 2**20

# The advice to clients if nothing starts the engine again.
_ADVICE = "restart the server"

_logger = get_logger(__name__)


class EngineClient:
    """One engine process. Created by `start`; `close` ends the process.

    num_sent: number of messages that were sent to the engine. cause: why the engine is gone, None while it runs. ended:
    set when the engine is gone and all requests have been told. stirred: set by every message that is sent, and by the
    end; the task that waits for it clears it. on_news: called when requests have got what one read brought, and at the
    end.
    """

    def __init__(
        self,
        child: EngineChild,
        reader: StreamReader,
        writer: StreamWriter,
        info: ModelInfo,
        *,
        exit_grace_s: float = _EXIT_GRACE_S,
        advice: str = _ADVICE,
    ) -> None:
        self.info = info
        self.child = child
        self.num_sent = 0
        self.cause: str | None = None
        self.ended = asyncio.Event()
        self.stirred = asyncio.Event()
        self.on_news: Callable[[], None] = lambda: None
        self._exit_grace_s = exit_grace_s
        self._advice = advice
        self.stats = EngineStats(num_blocks=info.num_kv_blocks, num_free_blocks=info.num_kv_blocks)
        self._reader = reader
        self._writer = writer
        self._requests = OpenRequests(self._send)
        self._changes: deque[asyncio.Future[None]] = deque()
        self._is_closing = False
        self._receiving = lasting_task(self._receive())

    @classmethod
    async def start(cls, config: EngineConfig, *, module: str = ENGINE_MODULE, advice: str = _ADVICE) -> Self:
        """Start an engine process and wait until it has loaded `config.model`, a local directory.

        module: the module that the process runs. advice: what clients are told to do when the engine is gone. Raises
        the exception of the engine (ConfigError, ModelLoadError, ...), EngineDeadError if it ended without one,
        OSError.
        """
        child, reader, writer = await EngineChild.start(module)
        try:
            writer.write(encode_frame(Start(config)))
            try:
                message = await _read_message(reader)
            except _ConnectionEnded as error:
                raise EngineDeadError(await child.how_it_ended()) from error
            if isinstance(message, Ready):
                grace_s = _EXIT_GRACE_S if config.kv_cache_disk is None else _SAVE_GRACE_S
                if message.info.num_ranks > 1:
                    await child.find_ranks()
                return cls(child, reader, writer, message.info, exit_grace_s=grace_s, advice=advice)
            raise _error_from(message)
        except BaseException as error:
            writer.close()
            # Nothing to save: the engine never started.
            await child.end(0.0 if isinstance(error, asyncio.CancelledError) else _EXIT_GRACE_S)
            raise

    @property
    def is_alive(self) -> bool:
        return self.cause is None

    @property
    def health(self) -> EngineHealth:
        return EngineHealth("ready") if self.cause is None else EngineHealth("dead", str(self._death()))

    def open(self, request: EngineRequest, take: Take) -> Callable[[], None]:
        """Send a request; see OpenRequests.open.

        take: gets an EngineDeadError if the engine is gone; an error of a single choice is in its delta. Raises
        InvalidRequestError for a request that can never be served or whose id is in use, EngineDeadError.
        """
        check_request(request, self.info)
        if not self.is_alive:
            raise self._death()
        return self._requests.open(request, take)

    def abort(self, request_ids: Sequence[str], choices: Sequence[tuple[str, int]] = ()) -> None:
        """As OpenRequests.abort. If the engine is gone, nothing happens."""
        self._requests.abort(request_ids, choices)

    async def change_adapter(self, name: str, path: str = "", *, replaces: bool = False) -> None:
        """Load the LoRA adapter at `path` under a name; an empty path unloads it. replaces: see Adapters.load.

        Raises InvalidRequestError and ModelLoadError, as Adapters.load does, and EngineDeadError.
        """
        if not self.is_alive:
            raise self._death()
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append(change)
        self._send(ChangeAdapter(name, path, replaces))
        await change

    async def close(self) -> None:
        """End the engine process and wait for it and its ranks. Requests in flight get an EngineDeadError."""
        self._is_closing = self._is_closing or self.is_alive
        self._writer.close()
        await self.child.end(self._exit_grace_s)
        await asyncio.gather(self._receiving, return_exceptions=True)

    async def kill(self, cause: str) -> None:
        """Kill the engine process now. Requests in flight get an EngineDeadError with this cause."""
        self._receiving.cancel()
        self._die(cause)
        self.child.kill()
        await asyncio.gather(self._receiving, return_exceptions=True)

    def _send(self, message: Add | Abort | ChangeAdapter) -> None:
        frames, position = encode_frame(message), 0
        while position < len(frames):
            position += FRAME_HEADER_BYTES + frame_length(frames[position : position + FRAME_HEADER_BYTES])
            self.num_sent += 1
        self.stirred.set()
        self._writer.write(frames)

    async def _receive(self) -> None:
        """Distribute deltas until the connection ends, then fail the requests that still wait."""
        cause = "the engine process ended"
        received = bytearray()
        try:
            while data := await self._reader.read(_READ_BYTES):
                received += data
                if (end := self._distribute(take_frames(received))) is not None:
                    cause = end
                    break
            else:
                cause = await self.child.how_it_ended()
        except OSError:
            cause = await self.child.how_it_ended()
        except asyncio.CancelledError:
            # asyncio.run ends, and nobody has called `close`; the process ends when its connection is closed.
            self._is_closing = True
            raise
        except GeneratorExit:
            # The event loop is closed already: nobody can be told any more.
            self.cause = cause
            raise
        finally:
            self._die(cause)

    def _distribute(self, bodies: Iterator[bytes]) -> str | None:
        """Give each request all of its deltas in these messages at once. Returns why none can follow, if so."""
        deltas: list[RequestDelta] = []
        end = None
        try:
            for body in bodies:
                message = decode_from_engine(body)
                if isinstance(message, AdapterChanged):
                    self._note_change(message)
                    continue
                if not isinstance(message, Outputs):
                    end = str(_error_from(message))
                    break
                self.stats = message.stats
                deltas += message.deltas
        except (msgspec.DecodeError, ValueError) as error:
            end = _not_a_message(error)
        self._requests.give(deltas)
        self.on_news()
        return end

    def _note_change(self, message: AdapterChanged) -> None:
        self.info.adapters = message.adapters
        change = self._changes.popleft()
        if change.done():
            return
        if message.kind:
            change.set_exception(_error_from(Failed(message.kind, message.message)))
        else:
            change.set_result(None)

    def _die(self, cause: str) -> None:
        if self.cause is not None:
            return
        if not self._is_closing:
            _logger.error("the engine is gone: %s", cause)
        self.cause = cause
        self.stats = without_gauges(self.stats)
        # A process that still runs ends when its connection is closed.
        self._writer.close()
        self._requests.fail_all(self._death)
        for change in self._changes:
            if not change.done():
                change.set_exception(self._death())
        self.ended.set()
        self.stirred.set()
        self.on_news()

    def _death(self) -> EngineDeadError:
        return EngineDeadError("the engine is closed" if self._is_closing else f"{self.cause}; {self._advice}")


def lasting_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that ends with the event loop if nobody ends it before; asyncio does not report it then."""
    task = asyncio.create_task(work)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


class _ConnectionEnded(EngineDeadError):
    """The engine process closed the connection without a message."""


async def _read_message(reader: StreamReader) -> FromEngine:
    """Read the next message. Raises _ConnectionEnded, or EngineDeadError for bytes that are not a message."""
    try:
        header = await reader.readexactly(FRAME_HEADER_BYTES)
        return decode_from_engine(await reader.readexactly(frame_length(header)))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise _ConnectionEnded("the engine process ended unexpectedly; see the log") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineDeadError(_not_a_message(error)) from error


def _not_a_message(error: Exception) -> str:
    return f"the engine process sent something that is not a message ({error})"


def _error_from(message: FromEngine) -> PagewickError:
    """Return the exception that the engine process reported, in its original class."""
    assert isinstance(message, Failed), "the engine process broke the protocol"
    kind: type[PagewickError] = getattr(errors, message.kind, EngineError)
    return kind(message.message)
