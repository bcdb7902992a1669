"""Thousands of bad bodies: each gets a response in OpenAI's shape, and none a 5xx, a reset, or internal details."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from random import Random
from typing import Any

from pagewick.server.api.admission import Admission
from pagewick.server.api.openai import OpenAIApi
from pagewick.server.api.text_routes import TextApi
from pagewick.server.core.core import Core
from pagewick.server.settings import ServerSettings
from tests.fake_engine import FakeClient, fake_engine
from tests.torture.bodies import VALID, at_the_edges, drawn, monsters
from tests.torture.http_client import Address, Response, ask, post
from tests.torture.serving import CHAT, MODEL, Server

NUM_DRAWN, NUM_DRAWN_DEEP = 1200, 50_000
# A part of all combinations of fields and edges, which are twice as many; a deep run tries all of them.
NUM_EDGES = 1000
NUM_CLIENTS = 8
# Details of the machine or the code.
SECRETS = re.compile(rb"/home|/work|/usr|0x[0-9a-f]{6}|Traceback|\.py\b|site-packages")


def test_every_route_that_takes_a_body_is_tried() -> None:
    engine = fake_engine(FakeClient())
    settings = ServerSettings(served_model_name=(MODEL,))
    log: Any = None
    openai = OpenAIApi(Core(engine, settings, log), Admission(engine))
    routes = [*openai.routes(), *TextApi(engine, settings).routes()]
    assert {route.path for route in routes if "POST" in (route.methods or ())} == set(VALID)


async def send_all(address: Address, bodies: list[tuple[str, bytes]]) -> list[Response]:
    """Return the responses, in the order of the bodies."""
    responses: list[Response] = [Response()] * len(bodies)
    numbers = iter(range(len(bodies)))

    async def client() -> None:
        for number in numbers:
            path, body = bodies[number]
            responses[number] = await ask(address, "POST", path, body)

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return responses


def fault_of(response: Response) -> str:
    """Return what is wrong with a response; empty if nothing is."""
    if not response.is_whole or not response.is_terminated:
        return "no response, or an unfinished one"
    if not 200 <= response.status < 500:
        return f"status {response.status}"
    if SECRETS.search(response.body + "".join(response.events).encode()):
        return "it shows details of the machine or the code"
    if response.status == 200:
        return ""
    error = response.error
    if not isinstance(error, dict) or sorted(error) != ["code", "message", "param", "type"]:
        return "the error does not have OpenAI's shape"
    is_well_formed = isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    is_well_formed = is_well_formed and all(isinstance(error[name], str | None) for name in ("code", "param"))
    return "" if is_well_formed and len(error["message"]) < 2000 else "the error has wrong types, or is too long"


def check(server: Server, bodies: list[tuple[str, bytes]]) -> None:
    num_troubles = len(server.troubles())
    responses = asyncio.run(send_all(server.address, bodies))
    failures = [
        f"{fault}: {path} {body[:300]!r} ({len(body)} bytes) -> {response.status} {response.body[:300]!r}"
        for (path, body), response in zip(bodies, responses, strict=True)
        if (fault := fault_of(response))
    ]
    assert not failures, f"{len(failures)} of {len(bodies)}:\n" + "\n".join(failures[:10])
    print(f"{len(bodies)} bodies: {dict(Counter(response.status for response in responses))}")
    assert server.troubles()[num_troubles:] == []
    good = asyncio.run(post(server.address, CHAT, VALID[CHAT]))
    assert good.status == 200


def test_each_field_at_each_edge(server: Server, seed: int, is_deep: bool) -> None:
    bodies = list(at_the_edges())
    check(server, bodies if is_deep else Random(seed).sample(bodies, NUM_EDGES))


def test_changed_bodies(server: Server, seed: int, is_deep: bool) -> None:
    random = Random(seed)
    check(server, [drawn(random) for _ in range(NUM_DRAWN_DEEP if is_deep else NUM_DRAWN)])


def test_huge_bodies(server: Server) -> None:
    check(server, list(monsters()))
