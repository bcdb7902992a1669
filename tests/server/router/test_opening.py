"""Opening: the beginning of a stream whose model is still being loaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest

from pagewick.server.api.anthropic.dialect import ANTHROPIC_EVENTS
from pagewick.server.api.framing import EventFraming
from pagewick.server.api.openai import OPENAI_EVENTS
from pagewick.server.errors import ApiError
from pagewick.server.router.opening import Opening

Sent = list[MutableMapping[str, Any]]
ERROR = ApiError(500, "the model could not be loaded", type="server_error", code="model_load_failed")
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"x-of-the-application", b"1")]}
EVENT = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": False}


def opened(framing: EventFraming | None, sent: Sent, *, loads_s: float) -> Opening:
    """Return an opening whose model has been loaded, which took some seconds, ten times as long as between pings."""

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def load() -> Opening:
        opening = Opening(framing, loads_s / 10 or 60.0, send)
        async with opening.pings():
            await asyncio.sleep(loads_s)
        return opening

    return asyncio.run(load())


def test_the_application_goes_on_with_a_response_that_has_begun() -> None:
    sent: Sent = []
    opening = opened(OPENAI_EVENTS, sent, loads_s=0.1)
    assert opening.is_begun
    head, *pings = sent
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert (b"content-type", b"text/event-stream; charset=utf-8") in head["headers"]
    assert (b"x-accel-buffering", b"no") in head["headers"]
    assert pings and all(ping["body"] == b": ping\n\n" and ping["more_body"] for ping in pings)
    sent.clear()
    for message in (HEAD, EVENT):
        asyncio.run(opening.send(message))
    assert sent == [EVENT] and opening.late_status is None


@pytest.mark.parametrize("framing", [OPENAI_EVENTS, None])
def test_a_response_that_has_not_begun_is_the_applications(framing: EventFraming | None) -> None:
    sent: Sent = []
    opening = opened(framing, sent, loads_s=0.1 if framing is None else 0.0)
    assert not opening.is_begun and not sent
    for message in (HEAD, EVENT):
        asyncio.run(opening.send(message))
    assert sent == [HEAD, EVENT]


@pytest.mark.parametrize(
    ("framing", "beginning", "key"),
    [(OPENAI_EVENTS, b"data: ", "code"), (ANTHROPIC_EVENTS, b"event: error\ndata: ", "message")],
)
def test_an_error_is_the_last_event(framing: EventFraming, beginning: bytes, key: str) -> None:
    found = []
    for is_from_application in (False, True):
        sent: Sent = []
        opening = opened(framing, sent, loads_s=0.1)
        sent.clear()
        if is_from_application:
            body = msgspec.json.encode(framing.error_body(ERROR))
            asyncio.run(opening.send({"type": "http.response.start", "status": 500, "headers": []}))
            asyncio.run(opening.send({"type": "http.response.body", "body": body[:9], "more_body": True}))
            asyncio.run(opening.send({"type": "http.response.body", "body": body[9:]}))
        else:
            asyncio.run(opening.fail(ERROR))
        (event,) = sent
        assert opening.late_status == ERROR.status
        assert event["body"].startswith(beginning) and event["body"].endswith(b"\n\n") and not event["more_body"]
        found.append(json.loads(event["body"].removeprefix(beginning)))
    assert found[0] == found[1] and found[0]["error"][key] in (ERROR.code, ERROR.message)


def test_an_error_while_loading_ends_the_pings() -> None:
    sent: Sent = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def load() -> None:
        opening = Opening(OPENAI_EVENTS, 0.01, send)
        with pytest.raises(ApiError):
            async with opening.pings():
                await asyncio.sleep(0.05)
                raise ERROR
        num_sent = len(sent)
        await asyncio.sleep(0.05)
        assert num_sent == len(sent) > 1

    asyncio.run(load())
