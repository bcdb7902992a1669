"""`--stream-interval`: the events of a stream, and other responses as without it."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from pagewick.errors import ConfigError
from pagewick.server.app import build_app
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine

BODY = {"messages": [{"role": "user", "content": "x"}]}


def ask(body: dict[str, object]) -> httpx.Response:
    client = FakeClient()
    client.texts = ["abcdefghij"]
    settings = ServerSettings(served_model_name=("m",), stream_interval=4)
    transport = httpx.ASGITransport(build_app(fake_engine(client), settings))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.post("/v1/chat/completions", json=body)

    return asyncio.run(main())


def test_an_event_has_as_many_tokens_as_the_interval() -> None:
    response = ask({**BODY, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert contents == ["", "a", "bcde", "fghi", "j", None]


def test_a_whole_response_is_the_same() -> None:
    assert ask(BODY).json()["choices"][0]["message"]["content"] == "abcdefghij"


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_is_at_least_one_token(interval: int) -> None:
    with pytest.raises(ConfigError, match="--stream-interval must be above 0"):
        ServerSettings(stream_interval=interval)
