"""Servers that are measured in turn with the same requests, and compared round by round.

On a machine with other users, speed changes by the minute, so that only measurements at the same time can be compared:
every round runs on one server, then at once on the next, and the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from pagewick.cli.benchmarking.http_load import LoadClient
from pagewick.cli.benchmarking.measurement import METRICS, Runs, Summary, paired_ratios
from pagewick.cli.benchmarking.workload import Workload, run_round
from pagewick.cli.server_address import ServerAddress
from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError

# The measuring process gives way to a server on the same machine.
NICENESS = 5
PATHS = {"chat": "/chat/completions", "completions": "/completions"}

OnRound = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server to measure. label: its name in the report. model: the server's name of its model."""

    label: str
    address: ServerAddress
    model: str

    @classmethod
    def connect(cls, url: str, label: str | None, wanted: str, api_key: str | None) -> Contestant:
        """Choose a server's model: the `wanted` one of the command line, or else its first one.

        Raises ConfigError if the server cannot be reached.
        """
        address = ServerAddress.parse(url, api_key)
        names = address.model_names()
        if not names:
            raise ConfigError(f"{address} serves no model")
        return cls(label or address.host_header, address, wanted if wanted in names else names[0])


def measure_servers(
    contestants: Sequence[Contestant],
    workload: Workload,
    *,
    endpoint: str,
    num_rounds: int,
    timeout: float,
    on_round: OnRound,
) -> list[Runs]:
    """Measure num_rounds rounds of each, after one that is not counted. on_round gets the label and the round's index.

    Raises ConfigError if every request to a server fails in the first round.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    results = [Runs(one.label) for one in contestants]

    async def run() -> None:
        clients = [LoadClient(one.address, PATHS[endpoint], timeout=timeout) for one in contestants]
        for round_index in range(num_rounds + 1):
            # Another server begins each round, so that effects on the next one are spread over all.
            for offset in range(len(contestants)):
                index = (round_index + offset) % len(contestants)
                one = contestants[index]
                on_round(one.label, round_index)
                summary = await _run_round(clients[index], one.model, workload, round_index, is_chat=endpoint == "chat")
                if round_index:
                    results[index].rounds.append(summary)
                elif not summary.num_finished:
                    kind = next(iter(summary.errors))
                    hint = "\n--no-ignore-eos omits a field that not every server knows" if "HTTP 4" in kind else ""
                    raise ConfigError(f"every request to {one.label} fails: {kind}{hint}")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return results


def report(contestants: Sequence[Contestant], results: Sequence[Runs], workload: Workload) -> dict[str, Any]:
    """Return all results as plain data; ratios are the first server's number / the other's."""
    first, *others = results
    servers = [
        {**result.as_dict(), "url": str(one.address), "model": one.model}
        for one, result in zip(contestants, results, strict=True)
    ]
    ratios: dict[str, dict[str, Any]] = {other.label: {} for other in others}
    for other in others:
        for metric in METRICS:
            spread = paired_ratios(first.rounds, other.rounds, metric)
            ratios[other.label][metric.name] = None if spread is None else asdict(spread)
    return {"workload": asdict(workload), "servers": servers, "ratios": ratios, "metrics": first.metrics()}


async def _run_round(client: LoadClient, model: str, workload: Workload, round_index: int, *, is_chat: bool) -> Summary:
    bodies = [workload.body(prompt, model=model, is_chat=is_chat) for prompt in workload.prompts(round_index)]
    start_times = list(workload.start_times(round_index))
    if round_index == 0:
        # One request for each stream is enough to warm up.
        bodies = bodies[: workload.concurrency]
        start_times = [0.0] * len(bodies)
    return await run_round(client.send, bodies, start_times, concurrency=workload.concurrency)


def introductions(contestants: Sequence[Contestant], wanted: str) -> list[str]:
    """Return a line for each server with the model that is measured. wanted: the model on the command line."""
    lines = []
    for one in contestants:
        remark = "" if wanted in (one.model, BUILTIN_MODEL) else f" (it has no {wanted})"
        lines.append(f"{one.label}: {one.model} on {one.address}{remark}")
    return lines
