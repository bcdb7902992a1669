"""`make bench`: Pagewick beside transformers on a random-weight model, in turn, with the machine's limits.

Each runs in a process of its own with the model loaded, and only one works at a time. After every round the machine's
memory bandwidth and matrix product rate are measured, because on a shared machine they change within minutes.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.limits import MachineLimits, limit, measure_bandwidth, measure_matmul_rate
from benchmarks.peer import Peer
from pagewick.cli.benchmarking.scenarios import Scenario, scenarios
from pagewick.cli.random_model import SHAPES, bench_cache_dir, cached_random_model
from pagewick.devices import num_cores

CONTESTANTS = {"pagewick": "benchmarks.peer_pagewick", "transformers": "benchmarks.peer_transformers"}


@dataclass
class Rounds:
    """Tokens per second by contestant and scenario, one value per round, and the machine's limits in each round."""

    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    machine: list[MachineLimits] = field(default_factory=list)

    def median_machine(self) -> MachineLimits:
        return MachineLimits(
            statistics.median(limits.bandwidth for limits in self.machine),
            statistics.median(limits.matmul_rate for limits in self.machine),
        )

    def ratio(self, scenario: str, left: str, right: str) -> float:
        """Return the median of the rounds' ratios, whose two values were measured one right after the other."""
        pairs = zip(self.rates[left, scenario], self.rates[right, scenario], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def run_rounds(peers: dict[str, Peer], wanted: Sequence[Scenario], repeats: int, device: str) -> Rounds:
    """Run one round that is not counted, then `repeats` rounds. In a round each scenario runs on all peers in turn."""
    rounds = Rounds()
    for repeat in range(repeats + 1):
        for index, scenario in enumerate(wanted):
            seed = repeat * len(wanted) + index
            for name, peer in peers.items():
                rate = peer.run(scenario, seed).tokens_per_second(scenario)
                if repeat:
                    rounds.rates.setdefault((name, scenario.name), []).append(rate)
        rounds.machine.append(MachineLimits(measure_bandwidth(device), measure_matmul_rate(device)))
    return rounds


def report(rounds: Rounds, wanted: Sequence[Scenario], shape_name: str) -> list[dict[str, Any]]:
    """Return one row per scenario: rates, the limit, Pagewick's part of it, and the ratio to transformers."""
    machine = rounds.median_machine()
    rows = []
    for scenario in wanted:
        row: dict[str, Any] = {"scenario": scenario.name, "limit": limit(scenario, SHAPES[shape_name], machine)}
        for name in CONTESTANTS:
            if (name, scenario.name) in rounds.rates:
                row[name] = rounds.rates[name, scenario.name]
        row["part_of_limit"] = statistics.median(row["pagewick"]) / row["limit"]
        if "transformers" in row:
            row["ratio"] = rounds.ratio(scenario.name, "pagewick", "transformers")
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]], names: dict[str, str], title: str) -> None:
    table = Table(title=title)
    table.add_column("tokens/s, median (range)", no_wrap=True)
    for name in CONTESTANTS:
        table.add_column(names.get(name, f"{name} (not installed)"), justify="right", no_wrap=True)
    for heading in ("ratio", "limit", "of limit"):
        table.add_column(heading, justify="right")
    for row in rows:
        values = [_spread(row.get(name)) for name in CONTESTANTS]
        ratio = f"{row['ratio']:.2f} x" if "ratio" in row else "-"
        table.add_row(row["scenario"], *values, ratio, f"{_number(row['limit'])}", f"{row['part_of_limit']:.0%}")
    Console(width=110).print(table)


@contextmanager
def open_peers(model: Path, device: str, num_threads: int) -> Iterator[dict[str, Peer]]:
    """Yields the contestants that are installed, with their models loaded."""
    with ExitStack() as stack:
        peers = {}
        for name, module in CONTESTANTS.items():
            if importlib.util.find_spec(name) is not None:
                peers[name] = Peer(module, model, device, num_threads)
                stack.callback(peers[name].close)
        yield peers


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Rounds to take the median of.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda")
@click.option("--threads", type=click.IntRange(1), default=num_cores(), help="CPU threads of each contestant.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
def main(shape: str, repeats: int, device: str, threads: int, output: Path | None) -> None:
    """Compare Pagewick with transformers on random weights in bf16."""
    model = cached_random_model(shape)
    torch.set_num_threads(threads)
    wanted = scenarios()
    with open_peers(model, device, threads) as peers:
        names = {name: peer.name for name, peer in peers.items()}
        rounds = run_rounds(peers, wanted, repeats, device)
    machine = rounds.median_machine()
    rows = report(rounds, wanted, shape)
    bandwidths = [limits.bandwidth / 1e9 for limits in rounds.machine]
    print_table(rows, names, f"{shape}, random weights, bf16 on {device}, {threads} threads, {repeats} rounds")
    click.echo(
        f"limits from this run: memory {machine.bandwidth / 1e9:.1f} GB/s (from {min(bandwidths):.1f} to "
        f"{max(bandwidths):.1f}), bf16 matrix product {machine.matmul_rate / 1e9:,.0f} GFLOP/s"
    )
    output = output or bench_cache_dir() / "result.json"
    result = {"shape": shape, "threads": threads, "names": names, "machine": asdict(machine), "rows": rows}
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    click.echo(f"result: {output}")


def _spread(values: list[float] | None) -> str:
    if values is None:
        return "-"
    return f"{_number(statistics.median(values))} ({_number(min(values))}-{_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


if __name__ == "__main__":
    main()
