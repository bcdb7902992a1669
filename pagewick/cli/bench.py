"""`pagewick bench`: tokens per second of an engine on this machine, without text or HTTP, or of a server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pagewick.cli.arguments import EngineCommand
from pagewick.cli.benchmarking.checks import (
    MIN_COMPARED_ROUNDS,
    SERVER_OPTIONS,
    WORKLOAD_OPTIONS,
    check_model,
    check_options,
    check_output,
    is_workload,
)
from pagewick.cli.benchmarking.measurement import Runs
from pagewick.cli.benchmarking.plot import Level, curve_of, print_plot, write_svg
from pagewick.cli.benchmarking.saved import check_replaceable, compare, load_report, save_report
from pagewick.cli.benchmarking.scenarios import DEFAULT_BATCH, measure, pooling_of, scenarios, scenarios_without_text
from pagewick.cli.benchmarking.workload import Workload, run_workload
from pagewick.cli.terminal_text import harmless
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError

if TYPE_CHECKING:
    from pagewick.engine.engine import Engine

DEFAULT_REPEATS = 3


# A result as plain data, the rounds of each engine or server, and a title.
Measured = tuple[dict[str, Any], list[Runs], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result. report: as plain data. show: prints it. draw: writes the file of --plot, if there is one."""

    report: dict[str, Any]
    show: Callable[[], None]
    draw: Callable[[], None] = lambda: None


@click.command(cls=EngineCommand)
@click.option("--shape", help="Measure random weights of this shape instead of a model, for example qwen3-0.6b.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Streams of the last fixed measurement, or all requests of a workload.  [default: 16]",
)
@click.option("--repeats", type=click.IntRange(1), help="Rounds to take the median of.  [default: 3, or 5 to compare]")
@click.option("--url", help="Measure the OpenAI-compatible server at this URL: http://host:port/v1, or unix:PATH.")
@click.option("--compare", multiple=True, metavar="URL[=NAME]", help="Another server to measure; may be repeated.")
@click.option(
    "--api-key-env",
    help="Environment variable with the servers' API key.  [default: PAGEWICK_API_KEY or OPENAI_API_KEY]",
)
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), help="Endpoint of servers.  [default: chat]")
@click.option("--input-len", type=click.IntRange(1), help="Tokens of a prompt; words for a server.  [default: 128]")
@click.option("--output-len", "--max-tokens", type=click.IntRange(1), help="Tokens of a response.  [default: 128]")
@click.option("--num-prompts", type=click.IntRange(1), help="Requests in a round.  [default: 64]")
@click.option("--concurrency", type=click.IntRange(1), help="Requests at the same time.  [default: 16]")
@click.option("--request-rate", type=click.FloatRange(0, min_open=True), help="Requests per second, at random times.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=None,
    help="Generate all tokens, past an end-of-sequence token.  [default: yes]",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds for a request.  [default: 600]")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Also write the result to this file.")
@click.option("--against", type=click.Path(path_type=Path, dir_okay=False), help="Compare with a file of --save.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Measure 1, 2, 4, ... up to --concurrency at a time, and draw speed over concurrency: on the terminal, and in "
    "this SVG file; - draws on the terminal only.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    config: EngineConfig,
    shape: str | None,
    batch: int | None,
    repeats: int | None,
    save: Path | None,
    against: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure tokens per second of MODEL (default: the built-in one), with random prompts.

    By default, four fixed measurements: prefill is the speed of reading a prompt, decode the speed of generating text
    in all streams together. A model that makes embeddings or rates texts is measured by the texts that it reads. With
    --input-len, --output-len, --num-prompts or --concurrency, a workload is measured instead; with --url, a workload
    on a server.
    """
    earlier = load_report(against) if against is not None else None
    check_options(options, shape=shape, batch=batch, repeats=repeats)
    if options["url"] is None:
        # Variables and a file may set these for runs with servers.
        options |= dict.fromkeys(SERVER_OPTIONS)
        if shape is not None:
            check_model(config)
    for path, flag in ((save, "--save"), (options["plot"], "--plot")):
        if path is not None and str(path) != "-":
            check_output(path, flag)
    if save is not None:
        check_replaceable(save)
    if is_workload(options):
        outcome = _bench_workload(config, _workload_of(config, options, batch), shape, repeats, options)
    else:
        batch = batch or DEFAULT_BATCH
        with closing(open_engine(config, shape=shape, max_num_seqs=batch)) as engine:
            outcome = _bench_scenarios(engine, batch, repeats or DEFAULT_REPEATS)
    if as_json:
        click.echo(json.dumps(outcome.report, indent=2))
    else:
        outcome.show()
    for line in compare(outcome.report, earlier) if earlier is not None else ():
        click.echo(harmless(line), err=as_json)
    # Files come last: whatever happens to them, the result is printed.
    if save is not None:
        save_report(save, outcome.report)
    outcome.draw()


def bench_batch(config: EngineConfig, batch: int, output_len: int | None) -> None:
    """Measure and print the speed of a number of requests at once, with short prompts, as vllm.rs's --batch does."""
    workload = Workload(input_len=16, num_prompts=batch, concurrency=batch)
    if output_len is not None:
        workload = replace(workload, output_len=output_len)
    _bench_workload(config, workload, None, 1, {"url": None}).show()


def _workload_of(config: EngineConfig, options: Mapping[str, Any], batch: int | None) -> Workload:
    """Return the command line's workload. With a request rate, only --concurrency itself limits requests in flight."""
    given = {name: options[name] for name in WORKLOAD_OPTIONS if options[name] is not None}
    given |= {} if batch is None else {"num_prompts": batch, "concurrency": batch}
    is_eos_ignored = options["ignore_eos"] is not False
    rate = options["request_rate"]
    # A server may still have the prompts of an earlier run in its prefix cache.
    is_drawn = options["url"] is not None and config.seed is None
    seed = random.randrange(2**31) if is_drawn else config.seed or 0
    workload = Workload(**given, request_rate=rate, ignore_eos=is_eos_ignored, seed=seed, is_seed_drawn=is_drawn)
    is_unlimited = rate is not None and "concurrency" not in given
    return replace(workload, concurrency=workload.num_prompts) if is_unlimited else workload


def _bench_workload(
    config: EngineConfig, workload: Workload, shape: str | None, repeats: int | None, options: Mapping[str, Any]
) -> Outcome:
    """Measure a workload on one or several servers, or on an engine in this process."""
    plot = options.get("plot")
    workloads = [workload] if plot is None else list(workload.levels())
    measured = _bench_servers if options["url"] is not None else _bench_engine
    found = list(measured(config, workloads, shape, repeats, options))
    levels = [Level(one.concurrency, results) for one, (_, results, _) in zip(workloads, found, strict=True)]
    report, results, title = found[-1]
    if plot is not None:
        report["curve"] = curve_of(levels)

    def show() -> None:
        from rich.console import Console

        from pagewick.cli.benchmarking.tables import print_runs

        console = Console(highlight=False)
        print_runs(console, title, results)
        if plot is not None:
            print_plot(console, levels)

    def draw() -> None:
        if plot is not None and str(plot) != "-":
            write_svg(plot, title.rpartition(",")[0], levels)

    return Outcome(report, show, draw)


def _bench_servers(
    config: EngineConfig, workloads: list[Workload], shape: str | None, repeats: int | None, options: Mapping[str, Any]
) -> Iterator[Measured]:
    from pagewick.cli.benchmarking.server_bench import bench_servers

    num_rounds = repeats or (MIN_COMPARED_ROUNDS if options["compare"] else DEFAULT_REPEATS)
    for workload in workloads:
        report, results = bench_servers(config.model, workload, num_rounds, options)
        yield report, results, f"{report['servers'][0]['model']}: {workload.describe('words')}"


def _bench_engine(
    config: EngineConfig, workloads: list[Workload], shape: str | None, repeats: int | None, options: Mapping[str, Any]
) -> Iterator[Measured]:
    with closing(open_engine(config, shape=shape, max_num_seqs=workloads[-1].concurrency)) as engine:
        if pooling_of(engine.info):
            raise ConfigError(
                f"{engine.info.architecture} writes no text, so that a workload of responses cannot be measured; leave "
                "out --input-len, --output-len, --num-prompts and --concurrency, and --plot"
            )
        model = msgspec.to_builtins(engine.info)
        room = engine.info.max_model_len - workloads[-1].input_len
        if room <= 0:
            where = f"leaves no room for --output-len in the context of {engine.info.max_model_len} tokens"
            raise ConfigError(f"--input-len {workloads[-1].input_len} {where}; lower it, or raise --max-model-len")
        if room < workloads[-1].output_len:
            click.echo(f"note: responses have {room:,} tokens, then the context is full", err=True)
            workloads[:] = [replace(workload, output_len=room) for workload in workloads]
        for workload in workloads:
            # The first round warms up and is not counted.
            rounds = [run_workload(engine, workload, index) for index in range((repeats or DEFAULT_REPEATS) + 1)][1:]
            results = [Runs("engine", rounds)]
            report = {"model": model, "workload": asdict(workload), **results[0].as_dict()}
            yield report, results, f"{model['architecture']}: {workload.describe('tokens')}"


def _bench_scenarios(engine: Engine, batch: int, repeats: int) -> Outcome:
    """Measure the scenarios that fit the context."""
    info = engine.info
    pooling = pooling_of(info)
    known = scenarios_without_text(batch, pooling) if pooling else scenarios(batch)
    wanted = [scenario for scenario in known if scenario.max_len <= info.max_model_len]
    skipped = [scenario.name for scenario in known if scenario not in wanted]
    results = {
        scenario.name: {name: round(rate, 2) for name, rate in asdict(spread).items()}
        for scenario, spread in measure(engine, wanted, repeats).items()
    }
    report = {
        "model": msgspec.to_builtins(info),
        "results": [{"scenario": name, **rates} for name, rates in results.items()],
        "metrics": {f"{name}, tokens/s": rates for name, rates in results.items()},
    }

    def show() -> None:
        from rich.console import Console

        from pagewick.cli.benchmarking.tables import print_rates

        title = f"{info.architecture}, {info.num_parameters / 1e6:,.0f} M parameters, {info.types()} on {info.device}"
        print_rates(Console(), title, results)
        if skipped:
            click.echo(f"omitted, longer than the context of {info.max_model_len} tokens: {', '.join(skipped)}")

    return Outcome(report, show)


def open_engine(config: EngineConfig, *, shape: str | None, max_num_seqs: int) -> Engine:
    """Start an engine to measure: with room for all streams, and without a prefix cache."""
    from pagewick.cli.random_model import cached_random_model
    from pagewick.engine.engine import Engine
    from pagewick.local_models import with_local_models

    if shape:
        config = replace(config, model=str(cached_random_model(shape)), weight_file=None)
    # A file or a variable may name a directory for prefixes, for other commands.
    config = replace(
        config,
        enable_prefix_caching=False,
        kv_cache_disk=None,
        max_num_seqs=max(config.max_num_seqs, max_num_seqs),
    )
    return Engine(with_local_models(config))
