"""Workloads: random prompts, with a number of requests at the same time or per second."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagewick.cli.benchmarking.measurement import RequestTiming, Summary
from pagewick.engine.messages import EngineRequest
from pagewick.errors import EngineError
from pagewick.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine

# Short and common words: each is about one token in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face others level
office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""

# Requests of a plot's smaller levels, times the number at the same time.
PROMPTS_PER_STREAM = 4

Send = Callable[[dict[str, Any]], Awaitable[RequestTiming]]


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one round, and when they are sent.

    input_len: words of a prompt, or tokens for an engine without text. output_len: the most tokens of a response.
    concurrency: requests at the same time. request_rate: requests per second, at random times (a Poisson process);
    concurrency is then only a limit. Without it, a request starts when another ends. ignore_eos: ask for all
    output_len. is_seed_drawn: nobody has chosen the seed, which is another one in every run.
    """

    input_len: int = 128
    output_len: int = 128
    num_prompts: int = 64
    concurrency: int = 16
    request_rate: float | None = None
    ignore_eos: bool = True
    seed: int = 0
    is_seed_drawn: bool = False

    def levels(self) -> Iterator[Workload]:
        """Yield smaller workloads, with 1, 2, 4, ... requests at the same time and fewer in all; then this one."""
        concurrency = 1
        while concurrency < self.concurrency:
            num_prompts = min(self.num_prompts, concurrency * PROMPTS_PER_STREAM)
            yield replace(self, concurrency=concurrency, num_prompts=num_prompts)
            concurrency *= 2
        yield self

    def prompts(self, round_index: int) -> list[str]:
        """Return a round's prompts: new ones in each round and for each concurrency, so that no cache has them.

        They are the same for every server.
        """
        draw = random.Random(f"{self.seed}/{self.concurrency}/{round_index}")
        words = _WORDS.split()
        return [" ".join(draw.choices(words, k=self.input_len)) for _ in range(self.num_prompts)]

    def token_prompts(self, round_index: int, vocab_size: int) -> list[list[int]]:
        """Return a round's prompts as random token ids, for an engine without a tokenizer: input_len tokens each."""
        draw = random.Random(f"{self.seed}/{round_index}").randrange
        return [[draw(vocab_size) for _ in range(self.input_len)] for _ in range(self.num_prompts)]

    def start_times(self, round_index: int) -> Iterator[float]:
        """Yield when each prompt is sent, in seconds after the start of the round."""
        draw = random.Random(f"{self.seed}/{round_index}/times")
        now = 0.0
        for _ in range(self.num_prompts):
            yield now
            now += draw.expovariate(self.request_rate) if self.request_rate is not None else 0.0

    def body(self, prompt: str, *, model: str, is_chat: bool) -> dict[str, Any]:
        """Return a request. It is greedy, so that every server and every round computes the same."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        options = {"max_tokens": self.output_len, "temperature": 0, "stream": True}
        return {"model": model, **asked, **options, "stream_options": {"include_usage": True}}

    def describe(self, unit: str) -> str:
        """Describe the workload in one line. unit: of the prompts' length."""
        pace = f"{self.concurrency} at a time"
        if self.request_rate is not None:
            limit = f", at most {pace}" if self.concurrency < self.num_prompts else ""
            pace = f"{self.request_rate:g} per second{limit}"
        lengths = f"{self.input_len} {unit} and up to {self.output_len} new tokens"
        return f"{self.num_prompts} requests of {lengths}, {pace}"


async def run_round(
    send: Send,
    bodies: Iterable[dict[str, Any]],
    start_times: Iterable[float],
    *,
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Summary:
    """Send every body at its time, with `concurrency` as the limit of requests in flight, and wait for all."""
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


def run_workload(
    engine: Engine, workload: Workload, round_index: int, *, clock: Callable[[], float] = time.perf_counter
) -> Summary:
    """Run one round on an idle engine, without text or HTTP. Raises EngineError.

    A request's time starts when the engine gets it.
    """
    params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=workload.ignore_eos)
    prompts = workload.token_prompts(round_index, engine.info.vocab_size)
    waiting = [(f"bench-{round_index}-{index}", prompt) for index, prompt in enumerate(prompts)][::-1]
    running: dict[str, tuple[float, RequestTiming]] = {}
    finished: list[RequestTiming] = []
    start = clock()
    while waiting or running:
        while waiting and len(running) < workload.concurrency:
            request_id, prompt = waiting.pop()
            running[request_id] = clock(), RequestTiming(num_prompt_tokens=len(prompt), num_output_tokens=0)
            engine.add(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, seed=workload.seed))
        deltas = engine.step()
        now = clock()
        for delta in deltas:
            if delta.error:
                raise EngineError(delta.error)
            request_start, timing = running[delta.request_id]
            if delta.token_ids:
                timing.add_piece(now - request_start)
            timing.num_output_tokens = (timing.num_output_tokens or 0) + len(delta.token_ids)
            timing.total = now - request_start
            if delta.finish_reason is not None:
                finished.append(running.pop(delta.request_id)[1])
    return Summary.of(finished, clock() - start)
