"""Ten times as many requests as there is room for: those admitted are served, the others are refused at once."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.torture.http_client import Response, post
from tests.torture.serving import COMPLETIONS, Server

# The crowded server runs 8 requests and lets 40 wait.
MAX_WAITING = 40
CAPACITY = MAX_WAITING + 8
FACTOR = 10
# Enough that all requests have arrived before the first ones finish, on a fast machine too.
NUM_TOKENS = 400


def test_admitted_requests_are_served_and_others_refused_at_once(crowded_server: Server, is_deep: bool) -> None:
    server = crowded_server

    async def one(number: int) -> tuple[Response, float]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        fields = {"prompt": f"{number} is", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": number % 2 == 0}
        response = await post(server.address, COMPLETIONS, fields)
        return response, loop.time() - begun

    async def all_at_once() -> list[tuple[Response, float]]:
        return await asyncio.gather(*(one(number) for number in range(FACTOR * CAPACITY)))

    for _ in range(5 if is_deep else 1):
        before = server.metrics()
        results = asyncio.run(all_at_once())
        statuses = Counter(response.status for response, _ in results)
        assert set(statuses) <= {200, 429}, statuses
        served = [(response, seconds) for response, seconds in results if response.status == 200]
        refused = [(response, seconds) for response, seconds in results if response.status == 429]
        for response, _ in served:
            assert response.is_terminated and response.error is None and response.finish_reasons == {0: "length"}
        for response, _ in refused:
            assert response.error is not None and response.error["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        # The queue is filled, and most refusals come before the waiting requests are served.
        assert len(served) >= MAX_WAITING and len(refused) > len(served)
        seconds = {"served": sorted(one for _, one in served), "refused": sorted(one for _, one in refused)}
        for name, ordered in seconds.items():
            half, most = ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))]
            print(f"{len(ordered)} {name}: half of them within {half:.2f} s, 99 % within {most:.2f} s")
        assert seconds["refused"][len(refused) // 2] < seconds["served"][len(served) // 2]
        after = server.wait_until_idle()
        assert after.finished - before.finished == {"length": len(served), "error": len(refused)}
        assert after.statuses - before.statuses == {"200": len(served), "429": len(refused)}
        assert after["pagewick:queue_refusals_total"] - before["pagewick:queue_refusals_total"] == len(refused)
