"""Workloads of `pagewick bench`, on an engine or on servers; and how a result is shown, saved and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.flags import flag_of
from pagewick.cli.terminal_text import harmless
from pagewick.config import EngineConfig

if TYPE_CHECKING:
    from pagewick.cli.benchmarking.measurement import Runs
    from pagewick.cli.benchmarking.workload import Workload
    from pagewick.engine.engine import Engine

DEFAULT_REPEATS = 3
# A comparison needs more rounds: with fewer, other work on the machine decides the result.
MIN_COMPARED_ROUNDS = 5
DEFAULT_TIMEOUT_S = 600.0
WORKLOAD_OPTIONS = ("input_len", "output_len", "num_prompts", "concurrency")
_SERVER_OPTIONS = ("compare", "api_key_env", "endpoint", "request_rate", "timeout")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result as plain data, and a function that shows it. --against compares the report's `metrics`."""

    report: dict[str, Any]
    show: Callable[[], None]


def check_options(options: Mapping[str, Any], *, shape: str | None, batch: int | None, repeats: int | None) -> None:
    """Raises click.UsageError for an option that would have no effect."""
    is_server = options["url"] is not None
    is_workload = is_server or any(options[name] is not None for name in WORKLOAD_OPTIONS)
    if not is_server:
        for name in filter(options.get, _SERVER_OPTIONS):
            raise click.UsageError(f"{flag_of(name)} needs --url.")
    elif shape is not None:
        raise click.UsageError("--shape has no meaning with --url: the server has its model.")
    if batch is not None and is_workload:
        raise click.UsageError("--batch is for the fixed measurements; give --concurrency.")
    if not is_workload and options["ignore_eos"] is not None:
        raise click.UsageError("--ignore-eos needs a workload: --url, --num-prompts or the like.")
    if options["compare"] and repeats is not None and repeats < MIN_COMPARED_ROUNDS:
        raise click.UsageError(f"--compare needs at least --repeats {MIN_COMPARED_ROUNDS}: less is not reliable.")


def bench_workload(engine: Engine, workload: Workload, repeats: int) -> Outcome:
    """Measure `repeats` rounds of a workload on an idle engine, after one that is not counted. Raises PagewickError."""
    import msgspec

    from pagewick.cli.benchmarking.engine_load import run_workload
    from pagewick.cli.benchmarking.measurement import Runs

    runs = Runs("engine", [run_workload(engine, workload, index) for index in range(repeats + 1)][1:])
    report = {"model": msgspec.to_builtins(engine.info), "workload": asdict(workload), **runs.as_dict()}
    return Outcome(report, lambda: _show([runs], f"{engine.info.architecture}: {workload.describe('tokens')}"))


def bench_servers(config: EngineConfig, repeats: int | None, options: Mapping[str, Any]) -> Outcome:
    """Measure a workload on one server, or on several in turn. Raises PagewickError."""
    from pagewick.cli.benchmarking.server_bench import Contestant, introductions, measure_servers, report
    from pagewick.cli.server_address import own_api_key

    api_key = own_api_key(options["api_key_env"])
    contestants = [Contestant.connect(options["url"], None, config.model, api_key)]
    for text in options["compare"]:
        url, _, label = text.partition("=")
        contestants.append(Contestant.connect(url, label or None, config.model, api_key))
    if len({one.label for one in contestants}) < len(contestants):
        raise click.UsageError("two servers have the same name; name one with --compare URL=NAME.")
    for line in introductions(contestants, config.model):
        click.echo(harmless(line), err=True)
    workload = workload_of(config, options)
    results = measure_servers(
        contestants,
        workload,
        endpoint=options["endpoint"] or "chat",
        num_rounds=repeats or (MIN_COMPARED_ROUNDS if len(contestants) > 1 else DEFAULT_REPEATS),
        timeout=options["timeout"] or DEFAULT_TIMEOUT_S,
        on_round=lambda label, index: click.echo(f"{label}: {f'round {index}' if index else 'warm-up'}", err=True),
    )
    title = f"{contestants[0].model}: {workload.describe('words')}"
    return Outcome(report(contestants, results, workload), lambda: _show(results, title))


def workload_of(config: EngineConfig, options: Mapping[str, Any]) -> Workload:
    """Return the command line's workload. With a request rate, only --concurrency itself limits requests in flight."""
    from pagewick.cli.benchmarking.workload import Workload

    given = {name: options[name] for name in WORKLOAD_OPTIONS if options[name] is not None}
    is_eos_ignored = options["ignore_eos"] is not False
    rate = options["request_rate"]
    workload = Workload(**given, request_rate=rate, ignore_eos=is_eos_ignored, seed=config.seed or 0)
    is_unlimited = rate is not None and "concurrency" not in given
    return replace(workload, concurrency=workload.num_prompts) if is_unlimited else workload


def finish(outcome: Outcome, *, save: Path | None, earlier: Mapping[str, Any] | None, as_json: bool) -> None:
    """Save, show and compare a result. Raises ConfigError if it cannot be written."""
    from pagewick.cli.benchmarking.saved import compare, save_report

    if save is not None:
        save_report(save, outcome.report)
    if as_json:
        click.echo(json.dumps(outcome.report, indent=2))
    else:
        outcome.show()
    for line in compare(outcome.report, earlier) if earlier is not None else ():
        click.echo(harmless(line), err=as_json)


def _show(results: list[Runs], title: str) -> None:
    from rich.console import Console

    from pagewick.cli.benchmarking.tables import print_runs

    print_runs(Console(highlight=False), title, results)
