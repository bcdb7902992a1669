"""Workloads of `pagewick bench` as the command line gives them; how a result is shown, saved and compared."""

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
    return Outcome(report, lambda: show_runs([runs], f"{engine.info.architecture}: {workload.describe('tokens')}"))


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


def show_runs(results: list[Runs], title: str) -> None:
    """Print the results of one or several servers or engines as tables."""
    from rich.console import Console

    from pagewick.cli.benchmarking.tables import print_runs

    print_runs(Console(highlight=False), title, results)
