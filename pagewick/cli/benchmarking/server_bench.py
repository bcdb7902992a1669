"""Servers that are measured in turn with the same requests, and compared round by round.

On a machine with other users, speed changes by the minute, so that only measurements at the same time can be compared:
every round runs on one server, then at once on the next, and the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import click
import uvloop

from pagewick.cli.benchmarking.http_load import LoadClient
from pagewick.cli.benchmarking.measurement import METRICS, Runs, Summary, paired_ratios
from pagewick.cli.benchmarking.workload import Workload, run_round
from pagewick.cli.server_address import ServerAddress, api_key_from
from pagewick.cli.terminal_text import harmless
from pagewick.config import BUILTIN_MODEL
from pagewick.errors import ConfigError

# The measuring process gives way to a server on the same machine.
NICENESS = 5
DEFAULT_TIMEOUT_S = 600.0
PATHS = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server to measure. label: its name in the report. model: the server's name of its model."""

    label: str
    address: ServerAddress
    model: str


def bench_servers(
    wanted: str, workload: Workload, num_rounds: int, options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Runs]]:
    """Measure a workload on one server, or on several in turn. Raises PagewickError.

    wanted: the model on the command line; a server without it is measured with its first model. Returns a report as
    plain data, in which ratios are the first server's number / the other's, and the rounds of each server.
    """
    api_key = api_key_from(options["api_key_env"])
    contestants: list[Contestant] = []
    for text in (options["url"], *options["compare"]):
        # Only --compare has a name after the URL.
        url, _, label = text.partition("=") if contestants else (text, "", "")
        address = ServerAddress.parse(url, api_key)
        names = address.model_names()
        model = wanted if wanted in names else names[0]
        contestants.append(Contestant(label or address.host_header, address, model))
    if len({one.label for one in contestants}) < len(contestants):
        raise click.UsageError("two servers have the same name; name one with --compare URL=NAME.")
    for one in contestants:
        remark = "" if wanted in (one.model, BUILTIN_MODEL) else f" (it has no {wanted})"
        click.echo(harmless(f"{one.label}: {one.model} on {one.address}{remark}"), err=True)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    endpoint = options["endpoint"] or "chat"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(_measure(contestants, workload, endpoint, num_rounds, options["timeout"]))
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
    report = {
        "workload": asdict(workload),
        "model": contestants[0].model,
        "endpoint": endpoint,
        "servers": servers,
        "ratios": ratios,
        "metrics": first.metrics(),
    }
    return report, results


async def _measure(
    contestants: Sequence[Contestant], workload: Workload, endpoint: str, num_rounds: int, timeout: float | None
) -> list[Runs]:
    """Measure num_rounds rounds of each, after one that is not counted.

    Raises ConfigError if every request to a server fails in the first round.
    """
    results = [Runs(one.label) for one in contestants]
    clients = [LoadClient(one.address, PATHS[endpoint], timeout=timeout or DEFAULT_TIMEOUT_S) for one in contestants]
    for round_index in range(num_rounds + 1):
        # Another server begins each round, so that effects on the next one are spread over all.
        for offset in range(len(contestants)):
            index = (round_index + offset) % len(contestants)
            one = contestants[index]
            click.echo(f"{one.label}: {f'round {round_index}' if round_index else 'warm-up'}", err=True)
            summary = await _run_round(clients[index], one.model, workload, round_index, is_chat=endpoint == "chat")
            if round_index:
                results[index].rounds.append(summary)
            elif not summary.num_finished:
                kind = next(iter(summary.errors))
                hint = "\n--no-ignore-eos omits a field that not every server knows" if "HTTP 4" in kind else ""
                raise ConfigError(f"every request to {one.label} fails: {kind}{hint}")
    return results


async def _run_round(client: LoadClient, model: str, workload: Workload, round_index: int, *, is_chat: bool) -> Summary:
    bodies = [workload.body(prompt, model=model, is_chat=is_chat) for prompt in workload.prompts(round_index)]
    start_times = list(workload.start_times(round_index))
    if round_index == 0:
        # One request for each stream is enough to warm up.
        bodies = bodies[: workload.concurrency]
        start_times = [0.0] * len(bodies)
    return await run_round(client.send, bodies, start_times, concurrency=workload.concurrency)
