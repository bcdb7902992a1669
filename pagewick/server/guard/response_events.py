"""ResponseEvents: what the guard does to every response of the application."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.server.guard.connections import CONNECTION, WRITE_CHUNK, GuardedConnection, date_header


class ResponseEvents:
    """Around the application: tells each GuardedConnection where responses begin and end, and dates them.

    A client of HTTP/1.0 knows no chunked encoding: it gets a stream without it, which ends with the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedConnection = scope["state"][CONNECTION]
        is_old = scope["http_version"] == "1.0"
        if scope["method"] != "HEAD" and not is_old:
            scope.setdefault("extensions", {})[WRITE_CHUNK] = connection.write_chunk
        is_complete = False

        async def observe(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                connection.on_response_begun(is_unframed=is_old and not has_length)
                message = {**message, "headers": [date_header(), *message.get("headers", ())]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True
                connection.on_response_complete()

        try:
            await self._app(scope, receive, observe)
        finally:
            if not is_complete:
                connection.on_response_complete()
