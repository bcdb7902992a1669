"""Servers measured in turn with the same requests, and compared round by round.

On a machine that others use too, speed changes by the minute: only neighbours can be compared. So every round runs on
one server, then at once on the next, and the ratio is the median of the rounds' ratios.
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
    """A server to measure. label: what it is called in the report. model: its model's name there."""

    label: str
    address: ServerAddress
    model: str

    @classmethod
    def connect(cls, url: str, label: str | None, wanted: str, api_key: str | None) -> Contestant:
        """wanted: the model on the command line; a server that has no such model is measured with its first one.

        Raises ConfigError if the server is not there.
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
    """num_rounds rounds of each, after one that is not counted. on_round hears which server is measured, and when.

    Raises ConfigError if a server answers no request of the first round: there is nothing to measure.
    """
    with suppress(OSError):
        os.nice(NICENESS)
    results = [Runs(one.label) for one in contestants]

    async def run() -> None:
        clients = [LoadClient(one.address, PATHS[endpoint], timeout=timeout) for one in contestants]
        for round_index in range(num_rounds + 1):
            # Another one begins each time: what the one before left behind is not always the same one's burden.
            for offset in range(len(contestants)):
                index = (round_index + offset) % len(contestants)
                on_round(contestants[index].label, round_index)
                summary = await _round(clients[index], contestants[index].model, workload, round_index, endpoint)
                if round_index:
                    results[index].rounds.append(summary)
                else:
                    _check_warm_up(contestants[index], summary)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return results


def report(contestants: Sequence[Contestant], results: Sequence[Runs], workload: Workload) -> dict[str, Any]:
    """All of it as plain data; ratios are the first server's number / the other's."""
    first, *others = results
    servers = [
        {**result.as_dict(), "url": str(one.address), "model": one.model}
        for one, result in zip(contestants, results, strict=True)
    ]
    ratios = {other.label: _ratios(first, other) for other in others}
    return {"workload": asdict(workload), "servers": servers, "ratios": ratios, "metrics": first.metrics()}


def _ratios(first: Runs, other: Runs) -> dict[str, Any]:
    spreads = {metric.name: paired_ratios(first.rounds, other.rounds, metric) for metric in METRICS}
    return {name: None if spread is None else asdict(spread) for name, spread in spreads.items()}


async def _round(client: LoadClient, model: str, workload: Workload, round_index: int, endpoint: str) -> Summary:
    bodies = [
        workload.body(prompt, model=model, is_chat=endpoint == "chat") for prompt in workload.prompts(round_index)
    ]
    if round_index == 0:
        # To warm up, one for each stream is enough.
        bodies = bodies[: workload.concurrency]
        return await run_round(client.send, bodies, [0.0] * len(bodies), concurrency=workload.concurrency)
    start_times = workload.start_times(round_index)
    return await run_round(client.send, bodies, start_times, concurrency=workload.concurrency)


def _check_warm_up(contestant: Contestant, summary: Summary) -> None:
    if not summary.num_finished:
        kind = next(iter(summary.errors))
        hint = "\n--no-ignore-eos leaves out a field that not every server knows" if "HTTP 4" in kind else ""
        raise ConfigError(f"{contestant.label} answers no request: {kind}{hint}")


def introductions(contestants: Sequence[Contestant], wanted: str) -> list[str]:
    """A line for every server that says what is measured there; wanted: the model on the command line."""
    lines = []
    for one in contestants:
        remark = "" if wanted in (one.model, BUILTIN_MODEL) else f" (there is no {wanted} there)"
        lines.append(f"{one.label}: {one.model} on {one.address}{remark}")
    return lines
