"""EngineClient: the HTTP process's end of the engine. Ids only; imports no torch.

It listens on a Unix socket in a directory of its own (0700), starts the engine process, which connects back, and from
then on sends requests and hands each request its deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Self

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
    ToEngine,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from pagewick.errors import EngineDeadError, EngineError, InvalidRequestError, PagewickError
from pagewick.parallel.launch import module_command

# How long the engine process may take to end by itself once its connection is closed.
_EXIT_GRACE_S = 5.0


class EngineClient:
    """One engine process. Made by `start`; `close` ends the process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: StreamReader,
        writer: StreamWriter,
        info: ModelInfo,
    ) -> None:
        self.info = info
        self.stats = EngineStats(num_blocks=info.num_kv_blocks, num_free_blocks=info.num_kv_blocks)
        self._process = process
        self._reader = reader
        self._writer = writer
        self._deltas: dict[str, asyncio.Queue[RequestDelta | EngineDeadError]] = {}
        self._cause_of_death: str | None = None
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
                return cls(process, reader, writer, message.info)
            raise _error_from(message)
        except BaseException:
            await _end(process, writer)
            raise

    @property
    def is_alive(self) -> bool:
        return self._cause_of_death is None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestDelta]:
        """The request's deltas; the last one has a finish_reason. Leaving the iterator early aborts the request.

        Raises InvalidRequestError for a request that can never be served, EngineError if the engine failed it,
        EngineDeadError if the engine is gone.
        """
        check_request(request, self.info)
        if request.request_id in self._deltas:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        queue: asyncio.Queue[RequestDelta | EngineDeadError] = asyncio.Queue()
        self._deltas[request.request_id] = queue
        is_finished = False
        try:
            self._send(Add([request]))
            while not is_finished:
                delta = await queue.get()
                if isinstance(delta, EngineDeadError):
                    is_finished = True
                    raise delta
                is_finished = delta.finish_reason is not None
                if delta.error is not None:
                    raise EngineError(delta.error)
                yield delta
        finally:
            del self._deltas[request.request_id]
            if not is_finished and self.is_alive:
                self._send(Abort([request.request_id]))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; their iterators end with finish_reason "abort"."""
        self._send(Abort(list(request_ids)))
        for request_id in request_ids:
            if request_id in self._deltas:
                self._deltas[request_id].put_nowait(RequestDelta(request_id=request_id, finish_reason="abort"))

    async def close(self) -> None:
        """End the engine process and wait for it. Requests in flight get an EngineDeadError."""
        await _end(self._process, self._writer)
        await self._receiving

    def _send(self, message: ToEngine) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)
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
                    if delta.request_id in self._deltas:
                        self._deltas[delta.request_id].put_nowait(delta)
        except (EngineDeadError, OSError):
            pass
        finally:
            self._cause_of_death = cause
            for queue in self._deltas.values():
                queue.put_nowait(EngineDeadError(cause))


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
    """The next message. Raises EngineDeadError when the connection has ended."""
    try:
        header = await reader.readexactly(FRAME_HEADER_BYTES)
        return decode_from_engine(await reader.readexactly(frame_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EngineDeadError("the engine process ended unexpectedly; its last words are in the log") from error


async def _end(process: asyncio.subprocess.Process, writer: StreamWriter) -> None:
    """Close the connection, which tells the engine to stop; kill it if it does not."""
    writer.close()
    try:
        await asyncio.wait_for(process.wait(), _EXIT_GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _error_from(message: FromEngine) -> PagewickError:
    """The exception that the engine process reported, in its own class."""
    assert isinstance(message, Failed), "the engine process broke the protocol"
    kind: type[PagewickError] = getattr(errors, message.kind, EngineError)
    return kind(message.message)
