"""A workload on an engine in this process, without text or HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewick.cli.benchmarking.measurement import RequestTiming, Summary
from pagewick.cli.benchmarking.workload import Workload
from pagewick.engine.messages import EngineRequest
from pagewick.errors import EngineError
from pagewick.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine


def run_workload(
    engine: Engine, workload: Workload, round_index: int, *, clock: Callable[[], float] = time.perf_counter
) -> Summary:
    """Run one round on an idle engine. A request's time starts when the engine gets it. Raises EngineError."""
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
