"""Runs `run_server` over a fake engine in its own process.

Arguments: a model directory, a port, and words: pause holds responses after two tokens, thinking turns thoughts on.
"""

from __future__ import annotations

import sys

import pagewick.async_llm
from pagewick.config import EngineConfig
from pagewick.engine.supervisor import AtEachStart, Supervisor
from pagewick.errors import ConfigError
from pagewick.server.run import ReadyServer, run_server
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient


class LoudClient(FakeClient):
    async def close(self) -> None:
        await super().close()
        print("engine closed", flush=True)


async def start(config: EngineConfig, *, hang_timeout_s: float, at_each_start: AtEachStart | None) -> FakeClient:
    client = LoudClient()
    if "pause" in sys.argv[3:]:
        client.pause_at = 2
    return client


def announce(server: ReadyServer) -> None:
    print(server.address, server.info.architecture, flush=True)


if __name__ == "__main__":
    Supervisor.start = start  # type: ignore[assignment, method-assign]
    # The directory has a tokenizer, and no model.
    pagewick.async_llm.check_models = lambda config: None
    try:
        thinking = True if "thinking" in sys.argv[3:] else None
        settings = ServerSettings.for_model(sys.argv[1], port=int(sys.argv[2]), shutdown_timeout=0.3, thinking=thinking)
        run_server(EngineConfig(model=sys.argv[1]), settings, on_ready=announce)
    except ConfigError as error:
        sys.exit(str(error))
    print("returned", flush=True)
