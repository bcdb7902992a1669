"""Ten times as many requests as there is room for: who is let in is served, who is not hears so at once."""

from __future__ import annotations

import asyncio

from tests.torture.http_client import Answer, post
from tests.torture.serving import COMPLETIONS, Server

# Of the strict server, which runs 8 and lets 40 wait.
MAX_WAITING = 40
CAPACITY = MAX_WAITING + 8
FACTOR = 10
# So many that all have asked before the first answers are whole, on a fast machine too.
NUM_TOKENS = 400


def test_who_is_let_in_is_served_and_others_are_told_at_once(strict_server: Server, is_deep: bool) -> None:
    server = strict_server

    async def one(number: int) -> tuple[Answer, float]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        fields = {"prompt": f"{number} is", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": number % 2 == 0}
        answer = await post(server.address, COMPLETIONS, fields)
        return answer, loop.time() - begun

    async def all_at_once() -> list[tuple[Answer, float]]:
        return await asyncio.gather(*(one(number) for number in range(FACTOR * CAPACITY)))

    for _ in range(5 if is_deep else 1):
        before = server.figures()
        results = asyncio.run(all_at_once())
        served = [(answer, seconds) for answer, seconds in results if answer.status == 200]
        refused = [(answer, seconds) for answer, seconds in results if answer.status == 429]
        assert len(served) + len(refused) == FACTOR * CAPACITY
        for answer, _ in served:
            assert answer.is_terminated and answer.error is None and answer.finish_reasons == {0: "length"}
        for answer, _ in refused:
            assert answer.error is not None and answer.error["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        # Room is not left empty; and most hear that there is none before the first of those who wait are served.
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
