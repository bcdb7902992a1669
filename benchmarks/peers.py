"""`python -m benchmarks.peers`: Pagewick beside other engines in one run, and the machine's limits.

In a round every measurement runs on all engines in turn, with another engine first each time, and the machine's
bandwidth and peak rates are measured before and after. Only values of the same round are compared: a ratio is the
median of the rounds' ratios, and a part of the limit is the median of the rounds' parts. benchmarks/README.md describes
the measurements and how to install the other engines.
"""

from __future__ import annotations

import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.accuracy import measure_errors, pagewick_logits
from benchmarks.cold_start import command_seconds, split_seconds, torch_seconds, transformers_seconds
from benchmarks.contestants import ENGINES, Contestant, Field
from benchmarks.machine import MachineProbe, describe_machine
from benchmarks.measurements import MEASUREMENTS, Face, Measurement
from benchmarks.peers_report import markdown, print_report
from benchmarks.rounds import run_rounds
from benchmarks.serving_cost import measure_serving
from benchmarks.weight_files import BF16, FORMATS
from pagewick.cli.random_model import SHAPES, cached_random_model
from pagewick.devices import num_cores
from pagewick.errors import ConfigError, PagewickError

RESULTS = Path(__file__).parent / "results"
PARTS = ("rates", "accuracy", "serving", "cold-start")
# It stands for the format in the name of a result.
PLACE = "{format}"


def measure_cold_starts(contestants: Sequence[Contestant], field: Field, repeats: int) -> dict[str, list[Any]]:
    """Measure cold starts of all contestants in turn, `repeats` times, after one that only fills the page cache."""
    measured: dict[str, list[Any]] = {}
    keys = {one.key for one in contestants}
    for repeat in range(repeats + 1):
        found: dict[str, Any] = {}
        if "pagewick" in keys:
            found["pagewick"] = command_seconds(field.model, field.num_threads)
            found["torch"] = torch_seconds()
            found["pagewick_split"] = split_seconds(field.model, field.num_threads)
        if "transformers" in keys:
            found["transformers"] = transformers_seconds(field.model, field.num_threads)
        for name, value in found.items():
            if repeat:
                measured.setdefault(name, []).append(value)
    return measured


def measure_all(
    field: Field,
    contestants: Sequence[Contestant],
    measurements: Sequence[Measurement],
    output: Path,
    *,
    parts: Sequence[str],
    repeats: int,
    idle_seconds: float,
    in_turn: bool,
) -> dict[str, Any]:
    """Measure everything; return the result as plain data. It is also written to `output` after every step."""
    result: dict[str, Any] = {
        "shape": field.shape,
        "format": field.format,
        "weights": asdict(field.weights),
        "threads": field.num_threads,
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "engines": {one.key: one.name for one in contestants},
        "bits": {one.key: one.bits for one in contestants},
        "in_turn": in_turn,
        "rounds": [],
    }
    if "accuracy" in parts:
        commands = {one.key: one.logits for one in contestants if one.logits is not None}
        reference = pagewick_logits(field.model, "float32", field.num_threads, is_reference=True)
        errors = measure_errors(commands, reference, field.vocab_size, field.logs)
        result["accuracy"] = {key: asdict(error) for key, error in errors.items()}
        write(result, output)
    if "rates" in parts:
        probe = MachineProbe(field.logs, field.weights.all, field.num_threads)
        for one_round in run_rounds(
            contestants, field, measurements, repeats=repeats, measure_machine=probe.measure, in_turn=in_turn
        ):
            result["rounds"].append(one_round)
            write(result, output)
    if "serving" in parts:
        result["idle_seconds"], result["serving"] = idle_seconds, {}
        for one in contestants:
            if one.server is not None:
                result["serving"][one.key] = asdict(measure_serving(one, field, idle_seconds))
                write(result, output)
    if "cold-start" in parts:
        result["cold_start"] = measure_cold_starts(contestants, field, repeats)
    write(result, output)
    return result


def write(result: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def load(file: Path) -> dict[str, Any]:
    """Return an earlier result. Raises ConfigError if the file is not one."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a result of benchmarks.peers") from None
    if not isinstance(result, dict) or not isinstance(result.get("rounds"), list) or "engines" not in result:
        raise ConfigError(f"{file} is not a result of benchmarks.peers; give one that it wrote")
    return result


@click.command()
@click.option("--engines", default=",".join(ENGINES), show_default=True, help="Engines, separated by commas.")
@click.option("--measure", default="", help="Only measurements whose name contains one of these: decode,context.")
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Parts to measure, separated by commas.")
@click.option("--faces", default=",".join(Face), show_default=True, help="Interfaces of the engines to measure.")
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option(
    "--format", "formats", default=BF16, show_default=True, help=f"Formats of the weights, of {', '.join(FORMATS)}."
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Rounds to take the median of.")
@click.option(
    "--threads", type=click.IntRange(1), default=num_cores(), show_default=True, help="Threads of each engine."
)
@click.option("--idle", type=click.FloatRange(1), default=60.0, show_default=True, help="Idle seconds to measure.")
@click.option("--in-turn", is_flag=True, help="Load one engine at a time: slower, for machines with little memory.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path),
    help="File of the result; {format} stands for the format.",
)  # fmt: skip
@click.option("--show", type=click.Path(dir_okay=False, path_type=Path), help="Print this result and measure nothing.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the tables as docs/performance.md has them.")
def main(
    engines: str, measure: str, parts: str, faces: str, shape: str, formats: str, repeats: int, threads: int,
    idle: float, in_turn: bool, output: Path | None, show: Path | None, as_markdown: bool,
) -> None:  # fmt: skip
    """Compare Pagewick with the engines that are installed, on random weights, on a CPU."""
    # By default SIGTERM would end this process at once and leave the servers running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    show_result = (lambda result: click.echo(markdown(result))) if as_markdown else print_report
    try:
        if show is not None:
            show_result(load(show))
            return
        wanted, asked = _chosen(engines, ENGINES, "--engines"), _chosen(parts, PARTS, "--parts")
        names, at = _chosen(formats, FORMATS, "--format"), _chosen(faces, list(Face), "--faces")
        if output is not None and len(names) > 1 and PLACE not in output.name:
            raise ConfigError(f"--output names one file for {len(names)} formats; put {PLACE} into its name")
        measurements = [one for one in MEASUREMENTS if any(part in one.name for part in measure.split(","))]
        if not measurements:
            known = "; ".join(one.name for one in MEASUREMENTS)
            raise ConfigError(f"no name contains any of --measure {measure!r}; the measurements are: {known}")
        for name in names:
            kind = "" if name == BF16 else f"{name}-"
            default = RESULTS / f"peers-{shape}-{kind}{platform.machine()}.json"
            file = default if output is None else output.with_name(output.name.replace(PLACE, name))
            with tempfile.TemporaryDirectory(prefix="pagewick-peers-") as logs:
                field = Field(shape, cached_random_model(shape), threads, Path(logs), name)
                contestants = [one.at(at) for one in field.contestants(wanted)]
                result = measure_all(
                    field, contestants, measurements, file, parts=asked, repeats=repeats, idle_seconds=idle,
                    in_turn=in_turn,
                )  # fmt: skip
            click.echo(f"result: {file}", err=True)
            show_result(result)
    except PagewickError as error:
        raise click.ClickException(str(error)) from None


def _chosen(given: str, known: Sequence[str], option: str) -> list[str]:
    """Return the names in a list with commas. Raises ConfigError for an unknown one."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ConfigError(f"{option} {given!r}: choose among {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
