"""A workload on an engine in this process: so many requests, some at a time, without text or HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewick.cli.benchmarking.measurement import RequestTiming, Runs, Summary
from pagewick.cli.benchmarking.workload import Workload
from pagewick.engine.messages import EngineRequest
from pagewick.errors import EngineError
from pagewick.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine


def measure_workload(engine: Engine, workload: Workload, repeats: int) -> Runs:
    """`repeats` rounds after one that is not counted. Raises EngineError if a request fails."""
    runs = Runs("engine")
    for round_index in range(repeats + 1):
        summary = run_workload(engine, workload, round_index)
        if round_index:
            runs.rounds.append(summary)
    return runs


def run_workload(
    engine: Engine, workload: Workload, round_index: int, *, clock: Callable[[], float] = time.perf_counter
) -> Summary:
    """One round on an idle engine. A request's clock starts when the engine is given it. Raises EngineError."""
    params = SamplingParams(temperature=0, max_tokens=workload.output_len, ignore_eos=workload.ignore_eos)
    prompts = workload.token_prompts(round_index, engine.info.vocab_size)
    waiting = [(f"bench-{round_index}-{index}", prompt) for index, prompt in enumerate(prompts)][::-1]
    running: dict[str, _Running] = {}
    finished: list[RequestTiming] = []
    start = clock()
    while waiting or running:
        while waiting and len(running) < workload.concurrency:
            request_id, prompt = waiting.pop()
            running[request_id] = _Running(clock(), len(prompt))
            engine.add(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, seed=workload.seed))
        deltas = engine.step()
        now = clock()
        for delta in deltas:
            if delta.error:
                raise EngineError(delta.error)
            running[delta.request_id].feed(len(delta.token_ids), now)
            if delta.finish_reason is not None:
                finished.append(running.pop(delta.request_id).timing)
    return Summary.of(finished, clock() - start)


class _Running:
    """A request that the engine works on."""

    def __init__(self, start: float, num_prompt_tokens: int) -> None:
        self.timing = RequestTiming(num_prompt_tokens=num_prompt_tokens, num_output_tokens=0)
        self._start = self._last = start

    def feed(self, num_tokens: int, now: float) -> None:
        timing = self.timing
        if num_tokens and timing.first is None:
            timing.first = now - self._start
        elif num_tokens:
            timing.gaps.append(now - self._last)
        timing.num_output_tokens = (timing.num_output_tokens or 0) + num_tokens
        timing.total = now - self._start
        self._last = now
