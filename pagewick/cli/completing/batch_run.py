"""Many requests through one engine, a few at a time, so that the memory used does not grow with their number.

The responses are exactly the server's: the requests go through its HTTP application, without HTTP.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from pagewick.cli.completing.batch_lines import (
    COMPLETIONS_URL,
    BatchLine,
    BatchMistake,
    BatchRequest,
    BatchResponse,
    BatchResult,
    has_field,
)
from pagewick.config import EngineConfig
from pagewick.errors import InvalidRequestError
from pagewick.log import get_logger

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

    from pagewick.async_llm import AsyncEngine

_logger = get_logger(__name__)

Respond = Callable[[BatchRequest], Awaitable[BatchResponse]]
OnResult = Callable[[BatchLine, BatchResult], None]

# Requests in flight for each sequence that the engine can run, so that it never waits for the next one.
IN_FLIGHT_PER_SEQUENCE = 2
LINES_READ_AHEAD = 64


async def run_batch(
    lines: Iterable[BatchLine], respond: Respond, on_result: OnResult, *, max_in_flight: int, is_ordered: bool
) -> None:
    """Respond to every line; call on_result for each as soon as its result is there, or in the lines' order.

    Raises the exceptions of reading the lines and of on_result. If reading fails or the caller is cancelled, on_result
    is first called for all results that are there, in any order; the other requests are cancelled.
    """
    # Lines in their order: in flight, or finished and not passed to on_result yet.
    in_flight: dict[asyncio.Task[BatchResult], BatchLine] = {}

    async def result_of(line: BatchLine) -> BatchResult:
        return line if isinstance(line, BatchMistake) else await respond(line)

    def pass_results(*, is_ordered: bool) -> None:
        for task in list(in_flight):
            if task.done():
                on_result(in_flight.pop(task), task.result())
            elif is_ordered:
                return

    reader = _read_in_thread(lines)
    next_line: asyncio.Future[BatchLine | None] | None = None
    is_read = False
    try:
        while in_flight or not is_read:
            if next_line is None and not is_read and len(in_flight) < max_in_flight:
                next_line = asyncio.ensure_future(anext(reader, None))
            # Results are passed on at once, even while the input is a pipe without anything to read.
            results = list(in_flight)[: 1 if is_ordered else None]
            waited: list[asyncio.Future[Any]] = [*results] if next_line is None else [next_line, *results]
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if next_line is not None and next_line.done():
                    line, next_line = next_line.result(), None
                    is_read = line is None
                    if line is not None:
                        in_flight[asyncio.create_task(result_of(line))] = line
            except BaseException:
                pass_results(is_ordered=False)
                raise
            pass_results(is_ordered=is_ordered)
    finally:
        left: list[asyncio.Future[Any]] = [*in_flight, *([next_line] if next_line is not None else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _read_in_thread(lines: Iterable[BatchLine]) -> AsyncIterator[BatchLine]:
    """Yield the lines, which a thread reads: a pipe may have nothing to read for a while. Raises as reading them does.

    The thread is a daemon, because nothing can interrupt its waiting for a pipe.
    """
    queue: asyncio.Queue[BatchLine | Exception | None] = asyncio.Queue()
    room = threading.Semaphore(LINES_READ_AHEAD)
    loop = asyncio.get_running_loop()

    def put(item: BatchLine | Exception | None) -> None:
        room.acquire()
        # The loop may be closed before the thread has read everything.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        try:
            for line in lines:
                put(line)
            put(None)
        # Any error is passed on: it would be lost in this thread.
        except Exception as error:
            put(error)

    threading.Thread(target=read, name="batch-input", daemon=True).start()
    while (item := await queue.get()) is not None:
        room.release()
        if isinstance(item, Exception):
            raise item
        yield item


@asynccontextmanager
async def opened_responder(config: EngineConfig) -> AsyncIterator[tuple[Respond, int]]:
    """Start an engine; yield the function that responds, and how many requests it should get at the same time.

    Raises as AsyncEngine.start does.
    """
    from pagewick.async_llm import AsyncEngine
    from pagewick.server.app import build_app
    from pagewick.server.guard.api_keys import ApiKeys
    from pagewick.server.settings import ServerSettings

    engine = await AsyncEngine.start(config)
    try:
        settings = ServerSettings.for_model(config.model)
        # Nobody else can send requests to this application, so the keys of the environment are not for it.
        app = build_app(engine, settings, keys=ApiKeys(settings, environ={}))

        async def respond(request: BatchRequest) -> BatchResponse:
            try:
                body = await _with_room(engine, request) if request.is_simple else request.body
                # ASCII, because a line may have strings that are not valid text; the server refuses these.
                status, content, ignored = await post(app, request.url, json.dumps(body).encode())
            # No line may end the others, whatever is wrong with it.
            except Exception as error:
                _logger.error("the request of line %s failed", request.custom_id, exc_info=error)
                return _failure(request, error)
            return BatchResponse(request.custom_id, status, content, ignored)

        yield respond, IN_FLIGHT_PER_SEQUENCE * engine.info.max_num_seqs
    finally:
        await engine.close()


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes, tuple[str, ...]]:
    """Return status and body of the application's response to a POST, and the fields that it ignored.

    Cancelling it aborts the request.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        # This client never disconnects.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    names = headers.get(b"x-pagewick-ignored", b"").decode()
    return status, b"".join(parts), tuple(names.split(", ")) if names else ()


def _failure(request: BatchRequest, error: Exception) -> BatchResponse:
    """Return what stands for the response to a request that failed on the way to the server's application."""
    message = f"internal error ({type(error).__name__}: {error}); the log says more"
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    return BatchResponse(request.custom_id, 500, json.dumps(body).encode())


async def _with_room(engine: AsyncEngine, request: BatchRequest) -> dict[str, Any]:
    """Return the body of a simple line; without max_tokens, a completion may fill the context, unlike OpenAI's."""
    body, prompt = request.body, request.body.get("prompt")
    if request.url != COMPLETIONS_URL or not isinstance(prompt, str) or has_field(body, "max_tokens"):
        return body
    try:
        token_ids = await engine.encode(prompt)
    except InvalidRequestError:
        # The server finds the same error, and responds with it.
        return body
    return {**body, "prompt": token_ids, "max_tokens": max(engine.info.max_model_len - len(token_ids), 1)}
