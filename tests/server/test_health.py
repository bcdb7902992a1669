"""The health routes, as load balancers and orchestrators see every state."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette

from pagewick.engine.health import EngineHealth
from pagewick.server.health import health_routes


def ask(health: EngineHealth, path: str, *, is_draining: bool = False, method: str = "GET") -> httpx.Response:
    app = Starlette(routes=list(health_routes(lambda: health, lambda: is_draining)))

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(asked())


READY = EngineHealth("ready", num_restarts=3)
RESTARTING = EngineHealth("restarting", "the engine process was killed", retry_after_s=17, num_failed_starts=4)
FAILING = EngineHealth("restarting", "it could not be started", retry_after_s=30, num_failed_starts=5)
HUNG = EngineHealth("hung", "no progress for 9 seconds", retry_after_s=10)
LOADING = EngineHealth("loading", "the model is loading")
DEAD = EngineHealth("dead", "the engine is gone")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
def test_a_ready_server_says_so_everywhere(path: str, method: str) -> None:
    answer = ask(READY, path, method=method)
    assert answer.status_code == 200
    if method == "GET":
        assert answer.json() == {"status": "ready" if path.endswith("live") else "ok"}


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
@pytest.mark.parametrize("health", [RESTARTING, FAILING, HUNG, LOADING, DEAD], ids=lambda health: health.state)
def test_a_server_that_is_not_ready_says_why_and_when_to_retry(path: str, health: EngineHealth) -> None:
    answer = ask(health, path)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == str(health.retry_after_s)
    error = answer.json()["error"]
    assert (error["status"], error["reason"]) == (health.state, health.reason)
    assert (error["type"], error["code"], error["param"]) == ("service_unavailable_error", health.state, None)
    assert health.reason in error["message"]
    assert ask(health, path, method="HEAD").status_code == 503


@pytest.mark.parametrize(
    ("health", "status"),
    [(LOADING, 200), (READY, 200), (RESTARTING, 200), (FAILING, 503), (HUNG, 503), (DEAD, 503)],
    ids=["loading", "ready", "restarting", "failing", "hung", "dead"],
)
def test_only_what_does_not_get_well_by_itself_is_not_live(health: EngineHealth, status: int) -> None:
    answer = ask(health, "/health/live")
    assert answer.status_code == status
    assert (answer.json()["error"] if status == 503 else answer.json())["status"] == health.state


def test_a_draining_server_is_live_but_not_ready() -> None:
    for path in ("/health", "/health/ready"):
        answer = ask(READY, path, is_draining=True)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert answer.json()["error"]["status"] == "draining"
    answer = ask(READY, "/health/live", is_draining=True)
    assert (answer.status_code, answer.json()) == (200, {"status": "draining"})


def test_a_hung_engine_is_named_also_while_draining() -> None:
    answer = ask(HUNG, "/health/live", is_draining=True)
    assert answer.status_code == 503 and answer.json()["error"]["status"] == "hung"


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
def test_nothing_else_can_be_done_there(path: str) -> None:
    assert ask(READY, path, method="POST").status_code == 405
