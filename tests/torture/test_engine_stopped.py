"""An engine that hangs raises an alarm within seconds, a busy one does not, and one that resumes has lost nothing."""

from __future__ import annotations

import asyncio
import time

import psutil

from tests.torture.http_client import Response, ask, post
from tests.torture.serving import COMPLETIONS, DEADLINE_S, MAX_NUM_SEQS, MODEL, Server

NUM_STREAMS = 4
NUM_TOKENS = 1500
# The documents promise 10 seconds; a machine that is busy with other work may take longer.
NOTICED_WITHIN_S = 20.0
CI_SATURATED_S, DEEP_SATURATED_S = 8.0, 30.0


async def wait_for(server: Server, path: str, status: int) -> float:
    begun = time.monotonic()
    while (await ask(server.address, "GET", path)).status != status:
        assert time.monotonic() - begun < DEADLINE_S, f"{path} never became {status}"
        await asyncio.sleep(0.1)
    return time.monotonic() - begun


async def stop_and_go_on(server: Server, engine: psutil.Process) -> tuple[float, float, list[Response]]:
    fields = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    usage = {"stream_options": {"include_usage": True}}

    def client(number: int) -> asyncio.Task[Response]:
        return asyncio.create_task(post(server.address, COMPLETIONS, fields | usage | {"prompt": f"{number} is"}))

    clients = [client(number) for number in range(NUM_STREAMS)]
    await asyncio.sleep(0.1)
    engine.suspend()
    # On a fast machine all of these may have finished already; this one cannot have.
    clients.append(client(NUM_STREAMS))
    try:
        noticed_s = await wait_for(server, "/health/live", 503)
        refused = await post(server.address, COMPLETIONS, {"prompt": "A", "max_tokens": 1})
        assert refused.status == 503 and int(refused.headers["retry-after"]) > 0
    finally:
        engine.resume()
    back_s = await wait_for(server, "/health/live", 200)
    return noticed_s, back_s, list(await asyncio.gather(*clients))


def test_a_stopped_engine_is_noticed_and_goes_on(server: Server) -> None:
    before = server.metrics()
    engine = server.engine()
    noticed_s, back_s, responses = asyncio.run(stop_and_go_on(server, engine))
    print(f"noticed after {noticed_s:.1f} s, live again {back_s:.1f} s after it resumed")
    assert noticed_s < NOTICED_WITHIN_S
    for response in responses:
        assert response.events[-1] == "[DONE]" and response.finish_reasons == {0: "length"}
        assert response.chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    # It was not replaced by a new engine.
    assert server.engine() == engine
    assert server.metrics()["pagewick:engine_restarts_total"] == before["pagewick:engine_restarts_total"]


async def saturate(server: Server, seconds: float) -> int:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    num_probes = 0

    async def client(number: int) -> None:
        """Send long and short prompts that share no prefix, so that the lengths of steps differ a lot."""
        turn = 0
        while loop.time() < until:
            turn += 1
            prompt = f"{number} {turn} " + "long " * (400 if number % 4 == 0 else 5)
            response = await post(server.address, COMPLETIONS, {"prompt": prompt, "max_tokens": 20, "ignore_eos": True})
            assert response.status == 200

    async def probe() -> None:
        nonlocal num_probes
        while loop.time() < until:
            live = await ask(server.address, "GET", "/health/live")
            assert live.status == 200, live.body
            ready = await ask(server.address, "GET", "/health/ready")
            assert ready.status == 200, ready.body
            num_probes += 1
            await asyncio.sleep(0.2)

    await asyncio.gather(probe(), *(client(number) for number in range(2 * MAX_NUM_SEQS)))
    return num_probes


def test_an_engine_at_its_limit_raises_no_alarm(server: Server, is_deep: bool) -> None:
    num_troubles = len(server.troubles())
    assert asyncio.run(saturate(server, DEEP_SATURATED_S if is_deep else CI_SATURATED_S)) > 5
    assert server.troubles()[num_troubles:] == []
