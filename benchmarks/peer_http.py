"""A server as a contestant: `python -m benchmarks.peer_http URL MODEL VOCABULARY FIELDS`.

All servers have the same client, that of `pagewick bench --url`: streamed completions of prompts that are token ids, so
that no tokenizer is involved. FIELDS: JSON with more fields for every request. The parent runs the client with a high
niceness; a token's time is when the client could read it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from benchmarks.peer import answer_requests
from pagewick.cli.benchmarking.http_load import LoadClient
from pagewick.cli.benchmarking.measurement import RequestTiming
from pagewick.cli.benchmarking.scenarios import Scenario, Timing
from pagewick.cli.server_address import ServerAddress

TIMEOUT_S = 900.0


class RequestFailedError(Exception):
    """A request of a measurement failed, or its response has another length than requested."""


async def stream_all(client: LoadClient, bodies: list[dict[str, Any]]) -> tuple[list[RequestTiming], list[float]]:
    """Send all requests at once; return their times, and when each began, in seconds after the first."""
    start = time.perf_counter()
    begun: list[float] = []

    async def one(body: dict[str, Any]) -> RequestTiming:
        begun.append(time.perf_counter() - start)
        return await client.send(body)

    return list(await asyncio.gather(*(one(body) for body in bodies))), begun


def timing_of(scenario: Scenario, timings: list[RequestTiming], begun: list[float]) -> Timing:
    """Return the timing of a scenario from those of its requests. Raises RequestFailedError."""
    for one in timings:
        if one.error is not None or one.first is None:
            raise RequestFailedError(f"{scenario.name}: {one.error or 'a response without text'}")
        if one.num_output_tokens != scenario.num_output_tokens or one.num_prompt_tokens != scenario.num_prompt_tokens:
            raise RequestFailedError(
                f"{scenario.name}: asked for {scenario.num_prompt_tokens} + {scenario.num_output_tokens} tokens, the "
                f"server counts {one.num_prompt_tokens} + {one.num_output_tokens}"
            )
    firsts = [start + (one.first or 0.0) for start, one in zip(begun, timings, strict=True)]
    ends = [start + one.total for start, one in zip(begun, timings, strict=True)]
    num_later = scenario.num_streams * (scenario.num_output_tokens - 1)
    return Timing(max(firsts), max(ends), num_later)


def main() -> None:
    url, model, vocab_size, fields = sys.argv[1:5]
    client = LoadClient(ServerAddress.parse(url), "/completions", timeout=TIMEOUT_S)
    common = {
        "model": model, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        **json.loads(fields),
    }  # fmt: skip

    def run(scenario: Scenario, seed: int) -> Timing:
        prompts = scenario.prompts(int(vocab_size), seed)
        bodies = [{**common, "prompt": prompt, "max_tokens": scenario.num_output_tokens} for prompt in prompts]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return timing_of(scenario, *runner.run(stream_all(client, bodies)))

    answer_requests(url, run)


if __name__ == "__main__":
    main()
