"""Bad bodies by the thousand: each gets an answer of OpenAI's shape, none a 5xx, a reset, or a look inside."""

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
from tests.torture.http_client import Address, Answer, ask, post
from tests.torture.serving import CHAT, MODEL, Server

NUM_DRAWN, NUM_DRAWN_DEEP = 1200, 50_000
# Of all fields at all edges, which are twice as many; a deep run tries all of them.
NUM_EDGES = 1000
NUM_CLIENTS = 8
# What would tell of the machine or the code.
SECRETS = re.compile(rb"/home|/work|/usr|0x[0-9a-f]{6}|Traceback|\.py\b|site-packages")


def test_every_route_that_takes_a_body_is_tried() -> None:
    engine = fake_engine(FakeClient())
    settings = ServerSettings(served_model_name=(MODEL,))
    log: Any = None
    openai = OpenAIApi(Core(engine, settings, log), Admission(engine))
    routes = [*openai.routes(), *TextApi(engine, settings).routes()]
    assert {route.path for route in routes if "POST" in (route.methods or ())} == set(VALID)


async def send_all(address: Address, bodies: list[tuple[str, bytes]]) -> list[Answer]:
    """The answers, in order."""
    answers: list[Answer] = [Answer()] * len(bodies)
    numbers = iter(range(len(bodies)))

    async def client() -> None:
        for number in numbers:
            path, body = bodies[number]
            answers[number] = await ask(address, "POST", path, body)

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return answers


def wrong_with(answer: Answer) -> str:
    """What an answer must not be; empty if it is as it should be."""
    if not answer.is_whole or not answer.is_terminated:
        return "not answered, or not to the end"
    if not 200 <= answer.status < 500:
        return f"status {answer.status}"
    if SECRETS.search(answer.body + "".join(answer.events).encode()):
        return "it tells of the machine"
    if answer.status == 200:
        return ""
    error = answer.error
    if not isinstance(error, dict) or sorted(error) != ["code", "message", "param", "type"]:
        return "the error has not OpenAI's shape"
    is_well_formed = isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    is_well_formed = is_well_formed and all(isinstance(error[name], str | None) for name in ("code", "param"))
    return "" if is_well_formed and len(error["message"]) < 2000 else "the error is odd, or long"


def check(server: Server, bodies: list[tuple[str, bytes]]) -> None:
    num_troubles = len(server.troubles())
    answers = asyncio.run(send_all(server.address, bodies))
    failures = [
        f"{wrong}: {path} {body[:300]!r} ({len(body)} bytes) -> {answer.status} {answer.body[:300]!r}"
        for (path, body), answer in zip(bodies, answers, strict=True)
        if (wrong := wrong_with(answer))
    ]
    assert not failures, f"{len(failures)} of {len(bodies)}:\n" + "\n".join(failures[:10])
    print(f"{len(bodies)} bodies: {dict(Counter(answer.status for answer in answers))}")
    assert server.troubles()[num_troubles:] == []
    good = asyncio.run(post(server.address, CHAT, VALID[CHAT]))
    assert good.status == 200


def test_each_field_at_each_edge(server: Server, seed: int, is_deep: bool) -> None:
    bodies = list(at_the_edges())
    check(server, bodies if is_deep else Random(seed).sample(bodies, NUM_EDGES))


def test_bodies_that_were_bent(server: Server, seed: int, is_deep: bool) -> None:
    random = Random(seed)
    check(server, [drawn(random) for _ in range(NUM_DRAWN_DEEP if is_deep else NUM_DRAWN)])


def test_bodies_that_are_huge(server: Server) -> None:
    check(server, list(monsters()))
