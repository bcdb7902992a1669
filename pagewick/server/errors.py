"""Turns exceptions into HTTP responses, in OpenAI's shape unless a dialect has another.

No body names a path, an address or a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from msgspec import UNSET, Struct, UnsetType, to_builtins
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from pagewick.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
)

CLIENT_CLOSED_REQUEST = 499
# Keys in a request's scope: the id of the request; the function of its dialect that makes status and body from an
# ApiError and this id; and the code of the error that was the answer, since not every dialect's body has it.
REQUEST_ID = "pagewick.request_id"
ERROR_ANSWER = "pagewick.error_answer"
ERROR_CODE = "pagewick.error_code"


class ErrorDetail(Struct):
    """message: the cause and the fix. type, code: words for programs, as OpenAI's. param: the wrong field.

    status, reason: state of the engine, in responses of /health only.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    status: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class ErrorResponse(Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An error response. `type` and `code` (a string or None) are OpenAI's words; `body` has OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = to_builtins(ErrorResponse(ErrorDetail(message, type, param, code)))

    def response(self, scope: MutableMapping[str, Any] | None = None) -> JSONResponse:
        """Return the response to the request with this scope, in the form of its dialect; OpenAI's if it has none."""
        scope = {} if scope is None else scope
        scope[ERROR_CODE] = self.code
        status, body = self.status, self.body
        if (answer := scope.get(ERROR_ANSWER)) is not None:
            status, body = answer(self, scope.get(REQUEST_ID, ""))
        return JSONResponse(body, status, self.headers)


def api_error(error: Exception) -> ApiError:
    """Return what a client is told about an exception."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            # LangChain looks for the code in the message.
            return ApiError(400, f"{error} ({error.code})", param=error.param, code=error.code)
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case EngineDeadError():
            headers = {"retry-after": str(error.retry_after_s)}
            return ApiError(503, str(error), type="service_unavailable_error", code="engine_dead", headers=headers)
        case QueueFullError():
            headers = {"retry-after": str(error.retry_after_s)}
            # Clients look for these words.
            message = f"Rate limit reached: {error}"
            return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)
        case DeadlineExceededError():
            # A client that set a deadline decides itself whether there is time for another try.
            headers = {"x-should-retry": "false"}
            return ApiError(504, str(error), type="timeout_error", code="deadline_exceeded", headers=headers)
        case EngineError():
            # The same request would fail again.
            return ApiError(500, str(error), type="server_error", headers={"x-should-retry": "false"})
        case ClientDisconnect():
            return ApiError(CLIENT_CLOSED_REQUEST, "the client has gone")
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            return ApiError(error.status_code, error.detail, code=code, headers=error.headers)
        case _:
            message = "internal error; the server's log says more"
            return ApiError(500, message, type="server_error", headers={"x-should-retry": "false"})
