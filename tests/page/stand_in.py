"""A server with the chat page and a scripted `/v1`, on a real socket in a thread of its own.

Its default response is a greeting: `python -m tests.page.stand_in` shows the page without a model.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pagewick.server.page_routes import page_routes
from pagewick.server.settings import ServerSettings

MODEL = "org/stand-in"
MAX_MODEL_LEN = 2048
USAGE: dict[str, Any] = {
    "prompt_tokens": 40,
    "completion_tokens": 9,
    "total_tokens": 49,
    "prompt_tokens_details": {"cached_tokens": 32},
}


Delta = dict[str, Any]


def call(index: int, call_id: str, name: str, *arguments: str) -> list[Delta]:
    """Return the deltas of a call, as the server sends them."""
    first = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [one]} for one in (first, *rest)]


@dataclass
class Answer:
    """The response to one request. With a status other than 200, it is only the error. A piece is a text or a delta."""

    pieces: Sequence[str | Delta] = ("Hello", " from", " the", " stand-in.")
    thoughts: Sequence[str] = ()
    status: int = 200
    error: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    finish_reason: str | None = "stop"
    # Number of pieces to send before waiting for StandIn.go_on.
    holds_after: int | None = None
    # Number of pieces after which nothing more comes, so that the client has to stop the response.
    stays_after: int | None = None
    pause_s: float = 0.0
    # Whether the connection ends without [DONE].
    breaks: bool = False


class StandIn:
    """`bodies` and `keys` are those of the requests so far; `answers` are the next responses, followed by greetings."""

    def __init__(self) -> None:
        app = Starlette(
            routes=[
                *page_routes(ServerSettings(docs=False)),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )
        config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False)
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._http.serve()))
        self.reset()

    def reset(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answers: list[Answer] = []
        self.models = [MODEL]
        self.max_model_len: int | None = MAX_MODEL_LEN
        self.modalities: list[str] | None = ["text"]
        self.key: str | None = None
        self.num_left = 0
        self._may_go_on = threading.Event()

    def go_on(self) -> None:
        self._may_go_on.set()

    def hold_apart(self) -> None:
        """Let `go_on` continue later requests only. Earlier ones wait until their clients leave."""
        self._may_go_on = threading.Event()

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._http.started:
            assert time.monotonic() < deadline, "the stand-in server did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._http.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self.go_on()
        self._http.should_exit = True
        self._http.force_exit = True
        self._thread.join(20)

    def _is_refused(self, request: Request) -> bool:
        self.keys.append(request.headers.get("authorization"))
        return self.key is not None and self.keys[-1] != f"Bearer {self.key}"

    async def _models(self, request: Request) -> Response:
        if self._is_refused(request):
            return _error(401, "the API key is missing or wrong")
        about = {"object": "model", "max_model_len": self.max_model_len, "input_modalities": self.modalities}
        cards = [{"id": name, **about} for name in self.models]
        return JSONResponse({"object": "list", "data": cards})

    async def _chat(self, request: Request) -> Response:
        if self._is_refused(request):
            return _error(401, "the API key is missing or wrong")
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if self.answers else Answer()
        if answer.status != 200:
            return _error(answer.status, answer.error or "failed", answer.headers)
        num_continued = USAGE["completion_tokens"] if self.bodies[-1].get("continue_final_message") else 0
        stream = self._stream(answer, self._may_go_on, num_continued)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(self, answer: Answer, may_go_on: threading.Event, num_continued: int) -> AsyncIterator[bytes]:
        usage = {**USAGE, "prompt_tokens": USAGE["prompt_tokens"] + num_continued}
        num_tokens = 0
        try:
            yield b": ping\n\n"
            yield _chunk({"role": "assistant", "content": ""})
            for thought in answer.thoughts:
                num_tokens += 1
                yield _chunk({"reasoning_content": thought}, usage={**usage, "completion_tokens": num_tokens})
                await asyncio.sleep(answer.pause_s)
            for number, piece in enumerate(answer.pieces):
                while number == answer.stays_after or (number == answer.holds_after and not may_go_on.is_set()):
                    await asyncio.sleep(0.01)
                num_tokens += 1
                delta = {"content": piece} if isinstance(piece, str) else piece
                yield _chunk(delta, usage={**usage, "completion_tokens": num_tokens})
                await asyncio.sleep(answer.pause_s)
            if answer.error is not None:
                yield _event(_error_body(answer.error))
                return
            if answer.breaks:
                return
            yield _chunk({}, answer.finish_reason)
            yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_left += 1
            raise


def _event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _chunk(delta: Delta, finish_reason: str | None = None, usage: object = None) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": usage})


def _error_body(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(_error_body(message), status, headers)


if __name__ == "__main__":
    server = StandIn()
    server.start()
    print(f"the page is at {server.url}; Ctrl-C stops it")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.stop()
