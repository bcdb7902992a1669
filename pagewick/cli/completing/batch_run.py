"""Many requests through one engine, some at a time: the memory it takes does not grow with their number.

The answers are those of the server, because they are its: the requests go through the HTTP application, without HTTP.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from pagewick.cli.completing.batch_lines import COMPLETIONS_URL, BatchAnswer, BatchLine, BatchMistake, BatchRequest
from pagewick.config import EngineConfig
from pagewick.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

    from pagewick.async_llm import AsyncEngine

Answerer = Callable[[BatchRequest], Awaitable[BatchAnswer]]
OnAnswer = Callable[[BatchRequest | BatchMistake, BatchAnswer | BatchMistake], None]

# Requests under way for each that the engine computes, so that it never waits for the next one.
IN_FLIGHT_PER_SEQUENCE = 2
LINES_READ_AHEAD = 64


async def run_batch(
    lines: Iterable[BatchLine], answer: Answerer, on_answer: OnAnswer, *, max_in_flight: int, is_ordered: bool
) -> None:
    """Answer every line; on_answer hears of each as soon as it is answered, or in the lines' order.

    Raises what reading the lines or on_answer raises. Where reading fails or the caller is cancelled, on_answer hears
    of all that is answered, also behind a line that is not; what is under way is given up.
    """
    running = _Running(answer, on_answer)
    reader = _LineReader(lines)
    next_line: asyncio.Task[BatchLine | None] | None = None
    is_read = False
    try:
        while running.tasks or not is_read:
            if next_line is None and not is_read and len(running.tasks) < max_in_flight:
                next_line = asyncio.create_task(reader.next_line())
            told = running.tasks[:1] if is_ordered else running.tasks
            line = None
            try:
                # A pipe may have nothing to read for a while; what is answered meanwhile is told at once.
                await asyncio.wait([*([next_line] if next_line else []), *told], return_when=asyncio.FIRST_COMPLETED)
                if next_line is not None and next_line.done():
                    line, next_line = next_line.result(), None
                    is_read = line is None
            except BaseException:
                running.tell_finished(is_ordered=False)
                raise
            if line is not None:
                running.start(line)
            running.tell_finished(is_ordered=is_ordered)
    finally:
        await _cancel([*running.tasks, *([next_line] if next_line is not None else [])])


class _Running:
    """Lines that are being answered, or are answered and not told yet, in their order."""

    def __init__(self, answer: Answerer, on_answer: OnAnswer) -> None:
        self._answer = answer
        self._on_answer = on_answer
        self._lines: dict[asyncio.Task[BatchAnswer | BatchMistake], BatchLine] = {}

    @property
    def tasks(self) -> list[asyncio.Task[BatchAnswer | BatchMistake]]:
        return list(self._lines)

    def start(self, line: BatchLine) -> None:
        self._lines[asyncio.create_task(self._answered(line))] = line

    def tell_finished(self, *, is_ordered: bool) -> None:
        """Tell what is answered; if is_ordered, only what comes before the first line that is not."""
        for task in self.tasks:
            if task.done():
                self._on_answer(self._lines.pop(task), task.result())
            elif is_ordered:
                return

    async def _answered(self, line: BatchLine) -> BatchAnswer | BatchMistake:
        return line if isinstance(line, BatchMistake) else await self._answer(line)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@asynccontextmanager
async def opened_answerer(config: EngineConfig) -> AsyncIterator[tuple[Answerer, int]]:
    """Who answers, and how many requests it should have at the same time. Raises as AsyncEngine.start does."""
    from pagewick.async_llm import AsyncEngine
    from pagewick.server.app import build_app
    from pagewick.server.settings import ServerSettings

    engine = await AsyncEngine.start(config)
    try:
        app = build_app(engine, ServerSettings.for_model(config.model))

        async def answer(request: BatchRequest) -> BatchAnswer:
            body = await _with_room(engine, request) if request.is_simple else request.body
            # As ASCII: what a line holds need not be text, and the server says so.
            status, content = await post(app, request.url, json.dumps(body).encode())
            return BatchAnswer(request.custom_id, status, content)

        yield answer, IN_FLIGHT_PER_SEQUENCE * engine.info.max_num_seqs
    finally:
        await engine.close()


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer to a POST. Cancelling it aborts the request."""
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
    status, parts = 500, list[bytes]()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        # This client never leaves.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


async def _with_room(engine: AsyncEngine, request: BatchRequest) -> dict[str, Any]:
    """The body of a simple line; a text to complete without max_tokens may fill the context, not OpenAI's 16 tokens."""
    body, prompt = request.body, request.body.get("prompt")
    if request.url != COMPLETIONS_URL or not isinstance(prompt, str) or body.get("max_tokens") is not None:
        return body
    try:
        token_ids = await engine.encode(prompt)
    except InvalidRequestError:
        # The server finds the same and says it.
        return body
    return {**body, "prompt": token_ids, "max_tokens": max(engine.info.max_model_len - len(token_ids), 1)}


class _LineReader:
    """Reads lines in a thread of its own: a pipe may have nothing to read for a while.

    The thread is a daemon, because nothing can end its waiting for a pipe.
    """

    def __init__(self, lines: Iterable[BatchLine]) -> None:
        self._queue: asyncio.Queue[BatchLine | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(LINES_READ_AHEAD)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(lines, loop), name="batch-input", daemon=True).start()

    async def next_line(self) -> BatchLine | None:
        """None at the end. Raises what reading raises."""
        item = await self._queue.get()
        self._room.release()
        if isinstance(item, Exception):
            raise item
        return item

    def _read(self, lines: Iterable[BatchLine], loop: asyncio.AbstractEventLoop) -> None:
        # The loop may be closed before the thread has read all.
        with suppress(RuntimeError):
            for item in _with_end(lines):
                self._room.acquire()
                loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _with_end(lines: Iterable[BatchLine]) -> Iterator[BatchLine | Exception | None]:
    """The lines, and what stands for their end: None, or the exception."""
    try:
        yield from lines
        yield None
    # A border: in its thread it would be lost.
    except Exception as error:
        yield error
