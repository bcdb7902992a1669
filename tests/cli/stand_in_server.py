"""StandInServer: an HTTP server in a thread that responds as a test tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]
STREAM = "text/event-stream"


def events(*chunks: dict[str, Any], end: str = "data: [DONE]\n\n") -> bytes:
    """Return the body of a streamed response, with a comment as servers send it to keep a connection open."""
    return b": ping\n\n" + b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in chunks) + end.encode()


def chat_chunk(**delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def usage_chunk(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}}


# JSON in which a field does not have OpenAI's type.
ODD_CHUNKS: list[Any] = [
    [],
    3,
    {"choices": {"0": {}}},
    {"choices": "Hi"},
    {"choices": [3]},
    {"choices": [{"delta": []}]},
    {"choices": [{"delta": {"content": ["Hi"]}}]},
    {"choices": [{"delta": {"reasoning": 3}}]},
    {"choices": [{"delta": {}, "finish_reason": {}}]},
    {"usage": []},
    {"usage": 3},
    {"usage": {"completion_tokens": "many"}},
    {"usage": {"completion_tokens": -1}},
    {"usage": {"completion_tokens": 10**400}},
]


class StandInServer:
    """models: names that GET /v1/models lists. reply: body -> status and body of the response to every POST.

    requests: (path, headers in lower case, body) of every POST.
    """

    def __init__(self) -> None:
        self.models = ["stand-in"]
        self.reply: Callable[[dict[str, Any]], Reply] = lambda body: (
            200,
            events(chat_chunk(role="assistant", content=""), chat_chunk(content="Hi"), usage_chunk(3, 1)),
        )
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self._answer(200, json.dumps({"data": [{"id": name} for name in server.models]}).encode())
                else:
                    self._answer(404, b"nothing here")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.requests.append((self.path, headers, body))
                self._answer(*server.reply(body))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator[StandInServer]:
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()
