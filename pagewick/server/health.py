"""GET /health, /health/ready and /health/live: for load balancers, and for whoever decides when to start us anew.

ready: requests are answered now. live: no; but it is no use to end this process, it will be ready by itself.
"""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagewick.engine.health import EngineHealth
from pagewick.server.errors import ApiError

# After so many failures in a row another one is likely, and a new process, on another machine maybe, worth a try.
MAX_FAILED_STARTS = 5
_LIVE_STATES = ("loading", "ready", "restarting")
# As a health state beside the engine's own.
_DRAINING = EngineHealth("ready", "the server is shutting down; ask another one")


class HasHealth(Protocol):
    """AsyncEngine is one."""

    @property
    def health(self) -> EngineHealth: ...


class HasDraining(Protocol):
    """Lifecycle is one. is_draining: requests in flight are finished, new ones refused."""

    is_draining: bool


def health_routes(engine: HasHealth, lifecycle: HasDraining) -> list[Route]:
    """The three routes; each answers HEAD as it does GET."""

    async def ready(request: Request) -> Response:
        health = engine.health
        if health.state != "ready":
            return _unavailable(health.state, health)
        if lifecycle.is_draining:
            return _unavailable("draining", _DRAINING)
        return JSONResponse({"status": "ok"})

    async def live(request: Request) -> Response:
        health = engine.health
        if health.state not in _LIVE_STATES or health.num_failed_starts >= MAX_FAILED_STARTS:
            return _unavailable(health.state, health)
        return JSONResponse({"status": "draining" if lifecycle.is_draining else health.state})

    return [
        Route("/health", ready, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
    ]


def _unavailable(state: str, health: EngineHealth) -> Response:
    """A 503 in OpenAI's shape; `status` and `reason` beside it are for programs that know this route."""
    message = f"the server is {state}" + (f": {health.reason}" if health.reason else "")
    headers = {"retry-after": str(health.retry_after_s), "cache-control": "no-store"}
    answer = ApiError(503, message, type="service_unavailable_error", code=state, headers=headers)
    answer.body["error"] |= {"status": state, "reason": health.reason}
    return JSONResponse(answer.body, answer.status, answer.headers)
