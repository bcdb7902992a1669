"""What is asked of a server: random prompts, and how many of them at the same time or per second."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagewick.cli.benchmarking.measurement import RequestTiming, Summary

# Short and common, so that a word is about one token for most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face others level
office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""

Send = Callable[[dict[str, Any]], Awaitable[RequestTiming]]


@dataclass(frozen=True, slots=True)
class Workload:
    """input_len: words of a prompt, or tokens where there are no words. output_len: tokens of an answer at most.

    concurrency: requests at the same time. request_rate: requests per second, at random times (a Poisson process);
    then concurrency is only a limit. None: the next one starts when one ends. ignore_eos: ask for all output_len.
    """

    input_len: int = 128
    output_len: int = 128
    num_prompts: int = 64
    concurrency: int = 16
    request_rate: float | None = None
    ignore_eos: bool = True
    seed: int = 0

    def prompts(self, round_index: int) -> list[str]:
        """Other ones for each round, so that none is in a cache; the same for every server."""
        draw = random.Random(f"{self.seed}/{round_index}")
        words = _WORDS.split()
        return [" ".join(draw.choices(words, k=self.input_len)) for _ in range(self.num_prompts)]

    def token_prompts(self, round_index: int, vocab_size: int) -> list[list[int]]:
        """The same as token ids, for an engine without a tokenizer: input_len tokens each."""
        draw = random.Random(f"{self.seed}/{round_index}").randrange
        return [[draw(vocab_size) for _ in range(self.input_len)] for _ in range(self.num_prompts)]

    def start_times(self, round_index: int) -> Iterator[float]:
        """Seconds after the start of a round, for each prompt."""
        draw = random.Random(f"{self.seed}/{round_index}/times")
        now = 0.0
        for _ in range(self.num_prompts):
            yield now
            now += draw.expovariate(self.request_rate) if self.request_rate is not None else 0.0

    def body(self, prompt: str, *, model: str, is_chat: bool) -> dict[str, Any]:
        """A request. Greedy, so that every server and every round does the same."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        options = {"max_tokens": self.output_len, "temperature": 0, "stream": True}
        return {"model": model, **asked, **options, "stream_options": {"include_usage": True}}


async def run_round(
    send: Send,
    bodies: Iterable[dict[str, Any]],
    start_times: Iterable[float],
    *,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Summary:
    """Send every body at its time, at most so many at once, and wait for all."""
    free = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> RequestTiming:
        try:
            return await send(body)
        finally:
            free.release()

    start = clock()
    tasks = []
    try:
        for body, start_time in zip(bodies, start_times, strict=True):
            await asyncio.sleep(max(start + start_time - clock(), 0))
            await free.acquire()
            tasks.append(asyncio.create_task(one(body)))
        timings = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return Summary.of(timings, clock() - start)
