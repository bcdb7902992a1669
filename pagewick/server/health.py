"""GET /health, /health/ready and /health/live: for load balancers, and for supervisors that restart processes.

ready: requests are served now. live: the process need not be ended, since it is ready or will be by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.engine.health import EngineHealth
from pagewick.server.api.json_response import json_response
from pagewick.server.api.operation import Operation, describes
from pagewick.server.errors import ApiError

# After this many failures in a row another one is likely, and a new process, perhaps on another machine, worth a try.
MAX_FAILED_STARTS = 5
_LIVE_STATES = ("loading", "ready", "restarting")


class HealthResponse(Struct):
    status: str


_HEALTH = Operation(tag="Server", response=HealthResponse)


def health_routes(engine_health: Callable[[], EngineHealth], is_draining: Callable[[], bool]) -> list[Route]:
    """The three routes; each answers HEAD as it does GET. is_draining: whether new requests are refused."""

    @describes(_HEALTH)
    async def ready(request: Request) -> Response:
        """Tell whether requests are served now."""
        health = engine_health()
        if health.state != "ready":
            return _unavailable(health.state, health.reason, health.retry_after_s)
        if is_draining():
            reason = "the server is shutting down; ask another one"
            return _unavailable("draining", reason, health.retry_after_s)
        return json_response(HealthResponse("ok"))

    @describes(_HEALTH)
    async def live(request: Request) -> Response:
        """Tell whether the process works, or will by itself, so that it need not be ended."""
        health = engine_health()
        if health.state not in _LIVE_STATES or health.num_failed_starts >= MAX_FAILED_STARTS:
            return _unavailable(health.state, health.reason, health.retry_after_s)
        return json_response(HealthResponse("draining" if is_draining() else health.state))

    return [
        Route("/health", ready, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
    ]


def _unavailable(state: str, reason: str, retry_after_s: int) -> Response:
    """A 503 in OpenAI's shape; `status` and `reason` beside it are for programs that know this route."""
    message = f"the server is {state}" + (f": {reason}" if reason else "")
    headers = {"retry-after": str(retry_after_s), "cache-control": "no-store"}
    error = ApiError(503, message, type="service_unavailable_error", code=state, headers=headers)
    error.body["error"] |= {"status": state, "reason": reason}
    return error.response()
