"""The engine process: `python -m pagewick.engine_process SOCKET PARENT_PID`; EngineChild starts it.

SOCKET is the number of the open socket that it inherits.

One thread reads messages from the socket into an inbox; the main thread steps the engine and writes outputs. Without
work it sleeps until a message arrives or a session ends. It ends when the connection closes, or when the parent or one
of its ranks dies.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import psutil

from pagewick import log
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    Abort,
    AdapterChanged,
    Add,
    ChangeAdapter,
    EngineRequest,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    RequestDelta,
    Start,
    ToEngine,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from pagewick.engine.progress import Progress
from pagewick.engine.startup import starting
from pagewick.errors import InvalidRequestError, PagewickError, QueueFullError
from pagewick.grammar_queue import Compiled, GrammarQueue
from pagewick.parallel.launch import die_with_parent

if TYPE_CHECKING:
    from pagewick.config import EngineConfig
    from pagewick.engine.engine import Engine
    from pagewick.text.grammars.constraint import GrammarCompiler

# Named explicitly, since __name__ is "__main__" in this process.
logger = log.get_logger("pagewick.engine_process")

# Seconds without work after which the vocabulary of grammars is made, which holds the GIL for half a second. The first
# request with a grammar would otherwise stop all others for as long. The thread that makes it has the usual priority:
# with a lower one, it would hold the GIL for longer on a busy machine.
PREPARE_AFTER_S = 3.0


# A full garbage collection visits every object of every request. With 100,000 waiting requests, collections would run
# all the time, and find nothing: finished requests are in no cycle. So they run a hundred times less often than usual.
GC_THRESHOLDS = (700, 10, 1000)


class ProtocolError(Exception):
    """The bytes that were received are not one of our messages."""


# None: the client has closed the connection.
Message = ToEngine | Compiled | ProtocolError | None
Inbox = queue.SimpleQueue[Message]


def main(connection_fd: int, parent_pid: int) -> int:
    die_with_parent(parent_pid)
    # The parent decides when to stop and closes the connection. A service manager signals all processes at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    log.set_up()
    progress = Progress.inherited(os.environ) or Progress.private()
    with socket.socket(fileno=connection_fd) as connection:
        # If a rank inherited the socket, the parent would not notice that this process is gone.
        connection.set_inheritable(False)
        inbox: Inbox = queue.SimpleQueue()
        is_ready = threading.Event()
        threading.Thread(target=_read_into, args=(connection, inbox, is_ready), daemon=True).start()
        start = inbox.get()
        if not isinstance(start, Start):
            return 1
        try:
            grammars = GrammarQueue(start.config, inbox.put)
            engine, imports_s = _load(start.config, grammars.compiler)
        except PagewickError as error:
            _send(connection, Failed(type(error).__name__, str(error)))
            return 1
        except Exception as error:
            _send(connection, _last_words(error, f"the engine failed: {type(error).__name__}: {error}"))
            return 1
        is_closing, has_failed = threading.Event(), False
        try:
            is_ready.set()
            gc.set_threshold(*GC_THRESHOLDS)
            if engine.info.num_ranks > 1:
                _follow_ranks(is_closing)
            timeline = [("imports", imports_s), *engine.info.timeline]
            _send(connection, Ready(msgspec.structs.replace(engine.info, timeline=timeline)))
            _serve(engine, grammars, inbox, connection, progress)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client is gone, so there is nothing left to do
        except Exception as error:
            has_failed = True
            # The text of the exception stays in the log, since clients get this message.
            _send(connection, _last_words(error, f"the engine failed ({type(error).__name__}); the log says more"))
            return 1
        finally:
            is_closing.set()
            # A GPU that has failed does so again in every call.
            with contextlib.suppress(Exception) if has_failed else contextlib.nullcontext():
                engine.close()
    return 0


def _load(config: EngineConfig, grammars: GrammarCompiler) -> tuple[Engine, float]:
    """Create the engine; return it, and how many seconds this process had run before."""
    with starting(config) as weights:
        # Not at the top: this imports torch, and `starting` must begin its work before.
        from pagewick.engine.engine import Engine

        imports_s = time.time() - psutil.Process().create_time()
        return Engine(config, grammars=grammars, weights=weights), imports_s


def _serve(engine: Engine, grammars: GrammarQueue, inbox: Inbox, connection: socket.socket, progress: Progress) -> None:
    """Step while there is work; otherwise wait for a message. Returns when the client closes the connection."""
    while True:
        deltas: list[RequestDelta] = []
        is_first = not engine.has_work
        while is_first or not inbox.empty():
            is_idle = is_first and inbox.empty()
            message = _sleep(engine, grammars, inbox, connection, progress) if is_idle else inbox.get()
            is_first = False
            # The client compares the number of messages taken with those it has sent, and Compiled is our own.
            if isinstance(message, Compiled):
                progress.work()
            else:
                progress.take()
            if message is None:
                return
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, ChangeAdapter):
                _send(connection, _change_adapter(engine, message))
                progress.mark()
            deltas += _handle(engine, grammars, message)
        if engine.has_work:
            deltas += engine.step()
        progress.mark()
        _send(connection, Outputs(deltas, engine.stats()))
        progress.mark()


def _sleep(
    engine: Engine, grammars: GrammarQueue, inbox: Inbox, connection: socket.socket, progress: Progress
) -> Message:
    """Wait for a message without using the processor, except that grammars are prepared once.

    The client learns of sessions that end meanwhile.
    """
    prepare_at = time.monotonic() + PREPARE_AFTER_S
    while True:
        num_sessions = engine.stats().num_sessions
        next_s = engine.check_when_idle()
        if engine.stats().num_sessions != num_sessions:
            _send(connection, Outputs([], engine.stats()))
        progress.rest()
        waits = [] if next_s is None else [min(next_s, threading.TIMEOUT_MAX)]
        if not grammars.is_prepared:
            waits.append(max(0.0, prepare_at - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=min(waits, default=None))
        if time.monotonic() >= prepare_at:
            grammars.prepare(engine.info.vocab_size)


def _handle(engine: Engine, grammars: GrammarQueue, message: ToEngine | Compiled) -> list[RequestDelta]:
    """Add or abort requests; return a delta for each request that the engine refuses."""
    if isinstance(message, Abort):
        grammars.forget(message.request_ids)
        engine.abort(message.request_ids, message.choices)
    elif isinstance(message, Compiled):
        if grammars.take(message):
            return _add(engine, message.request, message.error)
    elif isinstance(message, Add):
        # Those whose grammars are not compiled yet come back as Compiled.
        ready = [request for request in message.requests if not grammars.begin(request, engine.info.vocab_size)]
        return [refusal for request in ready for refusal in _add(engine, request)]
    return []


def _change_adapter(engine: Engine, message: ChangeAdapter) -> AdapterChanged:
    """Load or unload an adapter. Steps wait meanwhile."""
    try:
        if message.path:
            engine.load_adapter(message.name, message.path, replaces=message.replaces)
        else:
            engine.unload_adapter(message.name)
    except PagewickError as error:
        return AdapterChanged(engine.info.adapters, type(error).__name__, str(error))
    return AdapterChanged(engine.info.adapters)


def _add(engine: Engine, request: EngineRequest, error: InvalidRequestError | None = None) -> list[RequestDelta]:
    """error: why the request is wrong, if that is known. Returns its refusal, if it is refused."""
    try:
        if error is not None:
            raise error
        engine.add(request)
    except (InvalidRequestError, QueueFullError) as refusal:
        return [_refusal(request.request_id, refusal)]
    return []


def _refusal(request_id: str, error: InvalidRequestError | QueueFullError) -> RequestDelta:
    return RequestDelta(
        request_id=request_id,
        finish_reason="error",
        error=str(error),
        error_kind=type(error).__name__,
        retry_after_s=error.retry_after_s if isinstance(error, QueueFullError) else 0,
    )


def _read_into(connection: socket.socket, inbox: Inbox, is_ready: threading.Event) -> None:
    """Put every message into the inbox, and None at the end. If that comes while the model loads, end the process."""
    try:
        with connection.makefile("rb") as stream:
            while len(header := stream.read(FRAME_HEADER_BYTES)) == FRAME_HEADER_BYTES:
                body = stream.read(length := frame_length(header))
                if len(body) < length:
                    break
                inbox.put(decode_to_engine(body))
    except OSError:
        pass  # the connection was reset, which counts as its end
    except (msgspec.DecodeError, ValueError, PagewickError) as error:
        inbox.put(ProtocolError(f"the server sent something that is not a message ({error})"))
    finally:
        inbox.put(None)
        if not is_ready.is_set():
            os._exit(0)


def _send(connection: socket.socket, message: FromEngine) -> None:
    connection.sendall(encode_frame(message))


def _follow_ranks(is_closing: threading.Event) -> None:
    """End this process at once when a rank that it has started ends too soon, even if there is no work."""

    def wait() -> None:
        poll.poll()
        if not is_closing.is_set():
            logger.error("a rank of the engine has ended unexpectedly; the others end with it")
            os._exit(1)

    # On systems other than Linux, the next step notices it.
    if not hasattr(os, "pidfd_open"):
        return
    poll = select.poll()
    for rank in psutil.Process().children():
        poll.register(os.pidfd_open(rank.pid), select.POLLIN)
    threading.Thread(target=wait, name="ranks", daemon=True).start()


def _last_words(error: Exception, sentence: str) -> Failed:
    """Report an unexpected failure: the traceback to the log, the sentence to the client."""
    logger.error("the engine failed", exc_info=error)
    return Failed("EngineError", sentence)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    # Everything is closed. Shutting down the interpreter, with torch in it, would take another second.
    os._exit(status)
