"""What `pagewick bench` can measure: workloads on an engine or on servers; and what becomes of a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagewick.cli.terminal_text import harmless
from pagewick.config import EngineConfig

if TYPE_CHECKING:
    from pagewick.cli.benchmarking.server_bench import Contestant
    from pagewick.cli.benchmarking.workload import Workload
    from pagewick.engine.engine import Engine
    from pagewick.engine.messages import ModelInfo

DEFAULT_REPEATS = 3
# Of a comparison: fewer rounds say nothing on a machine that others use too.
MIN_COMPARED_ROUNDS = 5
DEFAULT_CONCURRENCY = 16
DEFAULT_TIMEOUT_S = 600.0
WORKLOAD_OPTIONS = ("input_len", "output_len", "num_prompts", "concurrency")
_SERVER_OPTIONS = ("compare", "api_key_env", "endpoint", "request_rate", "timeout")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result as plain data, and how to show it. metrics in the data: what --against compares."""

    report: dict[str, Any]
    show: Callable[[], None]


def check_options(options: Mapping[str, Any], *, shape: str | None, batch: int | None, repeats: int | None) -> None:
    """No option is without effect. Raises click.UsageError."""
    is_server = options["url"] is not None
    is_workload = is_server or any(options[name] is not None for name in WORKLOAD_OPTIONS)
    if not is_server:
        for name in filter(options.get, _SERVER_OPTIONS):
            raise click.UsageError(f"{_flag(name)} needs --url.")
    elif shape is not None:
        raise click.UsageError("--shape has no meaning with --url: the server has its model.")
    if batch is not None and is_workload:
        raise click.UsageError("--batch is for the fixed measurements; give --concurrency.")
    if not is_workload and options["ignore_eos"] is not None:
        raise click.UsageError("--ignore-eos needs a workload: --url, --num-prompts or the like.")
    if options["compare"] and repeats is not None and repeats < MIN_COMPARED_ROUNDS:
        raise click.UsageError(f"--compare needs at least --repeats {MIN_COMPARED_ROUNDS}: less says nothing.")


def bench_workload(engine: Engine, workload: Workload, repeats: int) -> Outcome:
    """A workload on an idle engine in this process. Raises PagewickError."""
    from pagewick.cli.benchmarking.engine_load import measure_workload

    runs = measure_workload(engine, workload, repeats)
    report = {"model": as_plain_data(engine.info), "workload": asdict(workload), **runs.as_dict()}
    return Outcome(report, lambda: _show([runs], f"{engine.info.architecture}: {describe(workload, 'tokens')}"))


def bench_servers(config: EngineConfig, repeats: int | None, options: Mapping[str, Any]) -> Outcome:
    """A workload on one server, or on several in turn. Raises PagewickError."""
    from pagewick.cli.benchmarking.server_bench import Contestant, introductions, measure_servers, report
    from pagewick.cli.server_address import own_api_key

    api_key = own_api_key(options["api_key_env"])
    contestants = [Contestant.connect(options["url"], None, config.model, api_key)]
    for text in options["compare"]:
        url, _, label = text.partition("=")
        contestants.append(Contestant.connect(url, label or None, config.model, api_key))
    _check_labels(contestants)
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
    title = f"{contestants[0].model}: {describe(workload, 'words')}"
    return Outcome(report(contestants, results, workload), lambda: _show(results, title))


def workload_of(config: EngineConfig, options: Mapping[str, Any]) -> Workload:
    """What the command line asks for. With a request rate, only --concurrency itself limits what is under way."""
    from pagewick.cli.benchmarking.workload import Workload

    given = {name: options[name] for name in WORKLOAD_OPTIONS if options[name] is not None}
    workload = Workload(**given, request_rate=options["request_rate"], seed=config.seed or 0)
    if workload.request_rate is not None and "concurrency" not in given:
        workload = replace(workload, concurrency=workload.num_prompts)
    return replace(workload, ignore_eos=options["ignore_eos"] is not False)


def describe(workload: Workload, unit: str) -> str:
    rate = workload.request_rate
    pace = f"{workload.concurrency} at a time" if rate is None else f"{rate:g} per second"
    lengths = f"{workload.input_len} {unit} and up to {workload.output_len} new tokens"
    return f"{workload.num_prompts} requests of {lengths}, {pace}"


def finish(outcome: Outcome, *, save: Path | None, earlier: Mapping[str, Any] | None, as_json: bool) -> None:
    """Show it, save it, compare it. Raises ConfigError if it cannot be written."""
    from pagewick.cli.benchmarking.saved import compare, save_report

    if save is not None:
        save_report(save, outcome.report)
    if as_json:
        click.echo(json.dumps(outcome.report, indent=2))
    else:
        outcome.show()
    for line in compare(outcome.report, earlier) if earlier is not None else ():
        click.echo(harmless(line), err=as_json)


def as_plain_data(info: ModelInfo) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(info)
    return plain


def _show(results: list[Any], title: str) -> None:
    from rich.console import Console

    from pagewick.cli.benchmarking.tables import print_runs

    print_runs(Console(highlight=False), title, results)


def _check_labels(contestants: list[Contestant]) -> None:
    """Results are told apart by them. Raises click.UsageError."""
    labels = [one.label for one in contestants]
    if len(set(labels)) < len(labels):
        raise click.UsageError("two servers have the same name; give one with --compare URL=NAME.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
