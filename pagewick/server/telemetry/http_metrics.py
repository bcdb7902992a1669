"""HttpMetrics: counts and times every HTTP request, and counts and logs those that are refused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.server.errors import CLIENT_CLOSED_REQUEST, ERROR_CODE, REQUEST_ID
from pagewick.server.lifecycle import WATCHED
from pagewick.server.telemetry.metrics import HttpCounts
from pagewick.server.telemetry.request_log import RefusalLog

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
# Handler of a path that no route has, and of requests that were answered before the routes.
NO_HANDLER = "none"
# Key in a request's scope: whether another HttpMetrics, that of a model, counts its refusal.
COUNTED_BELOW = "pagewick.counted_below"
# Entry of a scope: the status of an error that came after a stream had begun with 200.
LATE_STATUS = "pagewick.late_status"
# Bodies of errors above this size are not searched for a code.
_MAX_ERROR_BYTES = 64 * 2**10


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any]


_decoder = msgspec.json.Decoder(_ErrorBody)


class HttpMetrics:
    """Belongs around everything else, so that it also sees refusals by access control and by the server's state.

    A health probe while the server is not ready does not count as refused, nor does a client that has left.
    """

    def __init__(self, app: ASGIApp, metrics: HttpCounts, request_log: RefusalLog | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status: int | None = None
        code = None

        async def watch(message: Message) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status is not None and status >= 400 and code is None:
                code = _code_of(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watch)
            if status is None:
                # The client left before the response began.
                status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:
            status = CLIENT_CLOSED_REQUEST
            raise
        finally:
            method, handler = method_of(scope), handler_of(scope)
            # ErrorBoundary answers errors that are raised before a response has begun.
            status = scope.get(LATE_STATUS) or (500 if status is None else status)
            self._metrics.respond(method, handler, status, time.monotonic() - began)
            is_refused = status >= 400 and status != CLIENT_CLOSED_REQUEST and handler not in WATCHED
            if is_refused and not scope.get(COUNTED_BELOW):
                code = scope.get(ERROR_CODE) or code
                reason = self._metrics.refuse(status, code)
                if self._request_log is not None:
                    request_id = scope.get(REQUEST_ID, "-")
                    self._request_log.refused(request_id, method, handler, status, code or reason)


def method_of(scope: Scope) -> str:
    """Return the request's method; OTHER for one that HTTP does not have."""
    return scope["method"] if scope["method"] in METHODS else OTHER


def handler_of(scope: Scope) -> str:
    """Return the path of the route that answered, as it stands in the route table; NO_HANDLER if there was none."""
    route = scope.get("route")
    if route is None and "endpoint" in scope:  # older Starlettes name the function only
        routes = scope["router"].routes
        route = next((one for one in routes if getattr(one, "endpoint", None) == scope["endpoint"]), None)
    path = getattr(route, "path", NO_HANDLER)
    assert isinstance(path, str)
    return path


def _code_of(body: bytes) -> str | None:
    """Return the code of an error in OpenAI's shape, which is one of ours."""
    if not body or len(body) > _MAX_ERROR_BYTES:
        return None
    try:
        error = _decoder.decode(body).error
    except msgspec.DecodeError:
        return None
    code = error.get("code")
    return code if isinstance(code, str) else None
