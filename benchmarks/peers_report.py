"""The result of benchmarks.peers as tables: figures of each engine, ratios, and parts of the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.limits import StoredWeights
from benchmarks.machine import MachineRates
from benchmarks.measurements import DECODE, LONG, MEASUREMENTS, PREFILL, Face, Figure, kv_read_rate
from benchmarks.serving_cost import memory_budget
from benchmarks.weight_files import BF16
from pagewick.cli.random_model import SHAPES

OURS = "pagewick"
RATES = {
    "fp32": "fp32",
    "bf16_dot": "bf16 dot products",
    "bf16_tile": "AMX tiles",
    "int8_dot": "byte dot products",
    "int8_tile": "AMX tiles of bytes",
}

# Heading, rows.
Block = tuple[list[str], list[list[str]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a measurement at one face. rates: values of all rounds, by engine. limits: values of all rounds."""

    name: str
    face: Face
    figure: Figure
    rates: dict[str, list[float]]
    limits: list[float]

    @property
    def best_peer(self) -> str | None:
        """The fastest of the other engines, by its median."""
        others = [key for key in self.rates if key != OURS]
        return max(others, key=lambda key: statistics.median(self.rates[key]), default=None)

    def ratios(self, peer: str) -> list[float]:
        """Return our rate divided by a peer's, for each round."""
        return [ours / theirs for ours, theirs in zip(self.rates[OURS], self.rates[peer], strict=True)]

    def part_of_limit(self, key: str) -> float:
        parts = (rate / limit for rate, limit in zip(self.rates[key], self.limits, strict=True))
        return statistics.median(parts)


def rows_of(result: dict[str, Any]) -> list[Row]:
    """Return rows in the order of MEASUREMENTS, libraries before servers, without those missing in some round."""
    shape, rounds = SHAPES[result["shape"]], result["rounds"]
    weights = weights_of(result)
    is_quantized = result.get("format", BF16) != BF16
    limits = [MachineRates(**one["machine"]).limits(is_quantized=is_quantized) for one in rounds]
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for one in rounds:
        for entry in one["rates"]:
            found.setdefault((entry["measurement"], entry["face"], entry["figure"]), []).append(entry["rates"])
    rows = []
    for measurement in MEASUREMENTS:
        for face in Face:
            for figure in measurement.figures:
                per_round = found.get((measurement.name, face, figure), [])
                keys = [key for key in result["engines"] if per_round and all(key in rates for rates in per_round)]
                if keys and len(per_round) == len(rounds):
                    rates = {key: [one[key] for one in per_round] for key in keys}
                    bounds = [figure.limit(measurement.scenario, shape, machine, weights) for machine in limits]
                    rows.append(Row(measurement.row_name(figure), face, figure, rates, bounds))
    return rows


def weights_of(result: dict[str, Any]) -> StoredWeights | None:
    """Return the sizes of our weights; None means bf16, which older results do not say."""
    return StoredWeights(**result["weights"]) if "weights" in result else None


def rate_block(result: dict[str, Any]) -> Block:
    """Return tokens per second of every engine, the ratio to the best of the others, the limit, and the part of it."""
    keys = list(result["engines"])
    heading = ["tokens/s", "at", *result["engines"].values(), "ratio to the best", "limit", "of limit"]
    lines = []
    for row in rows_of(result):
        cells = [_spread(row.rates.get(key)) for key in keys]
        best = row.best_peer
        ratio = f"{_spread(row.ratios(best), 2)} x {best}" if OURS in row.rates and best is not None else "-"
        counted = OURS if OURS in row.rates else best
        part = f"{row.part_of_limit(counted):.0%}" if counted is not None else "-"
        part += "" if counted in (OURS, None) else f" ({counted})"
        lines.append([row.name, row.face, *cells, ratio, _number(statistics.median(row.limits)), part])
    return heading, lines


def context_block(result: dict[str, Any]) -> Block:
    """Return the cost of a long context: the rate of K/V reads, and the prefill time per token beside a short one's."""
    heading = ["context 8,192", "at", "engine", "K/V read", "of bandwidth", "prefill time per token, to that of 512"]
    shape, rounds = SHAPES[result["shape"]], result["rounds"]
    reads = [one["machine"]["read"] for one in rounds]
    by_name = {(row.name, row.face): row for row in rows_of(result)}
    lines = []
    for face in Face:
        wanted = [
            (DECODE.row_name(Figure.DECODE), face), (LONG.row_name(Figure.DECODE), face),
            (PREFILL.row_name(Figure.PREFILL), face), (LONG.row_name(Figure.PREFILL), face),
        ]  # fmt: skip
        if not all(key in by_name for key in wanted):
            continue
        decodes, prefills = [by_name[key].rates for key in wanted[:2]], [by_name[key].rates for key in wanted[2:]]
        for key, name in result["engines"].items():
            if not all(key in rates for rates in (*decodes, *prefills)):
                continue
            pairs = zip(decodes[0][key], decodes[1][key], strict=True)
            kv = [kv_read_rate(short, long, shape) for short, long in pairs]
            parts = [rate / read for rate, read in zip(kv, reads, strict=True)]
            slower = [short / long for short, long in zip(prefills[0][key], prefills[1][key], strict=True)]
            cells = [f"{_spread([rate / 1e9 for rate in kv])} GB/s", f"{statistics.median(parts):.0%}"]
            lines.append(["", face, name, *cells, f"{_spread(slower, 2)} x"])
    return heading, lines


def weights_block(result: dict[str, Any]) -> Block:
    """Return the size of each engine's weights, and what their format costs in exactness."""
    heading = ["weights", "bits of each", "mean error of logits: a prompt", "token by token"]
    errors = result.get("accuracy", {})
    if not errors and result.get("format", BF16) == BF16:
        return heading, []
    lines = []
    for key, name in result["engines"].items():
        found = errors.get(key)
        cells = ["-", "-"] if found is None else [f"{found[kind]:.2%}" for kind in ("prompt", "token_by_token")]
        lines.append([name, f"{result['bits'][key]:.2f}", *cells])
    return heading, lines


def serving_block(result: dict[str, Any]) -> Block:
    budget = memory_budget(result["shape"], weights_of(result))
    heading = [
        "serving", "memory (PSS), 32 streams", f"of {budget / 1e9:.2f} GB",
        f"idle CPU over {result.get('idle_seconds', 0):.0f} s", "start to first token",
    ]  # fmt: skip
    lines = []
    for key, cost in result.get("serving", {}).items():
        part = f"{cost['pss'] / budget:.0%}"
        memory, idle = f"{cost['pss'] / 1e9:.2f} GB", f"{cost['idle_cpu']:.2%}"
        lines.append([result["engines"][key], memory, part, idle, f"{cost['start_seconds']:.1f} s"])
    return heading, lines


def cold_start_block(result: dict[str, Any]) -> Block:
    heading = ["cold start to the first token", "seconds"]
    cold = result.get("cold_start", {})
    lines = []
    if OURS in cold:
        lines.append(["pagewick complete --max-tokens 1", _spread(cold[OURS], 2)])
        if "torch" in cold:  # older results lack this measurement
            beyond = [total - torch for total, torch in zip(cold[OURS], cold["torch"], strict=True)]
            lines.append(["  beyond an import of torch alone", _spread(beyond, 2)])
        for step in cold["pagewick_split"][0]:
            lines.append([f"  of it: {step}", _spread([split[step] for split in cold["pagewick_split"]], 2)])
    if "transformers" in cold:
        lines.append([result["engines"]["transformers"], _spread(cold["transformers"], 2)])
    return heading, lines


def machine_lines(result: dict[str, Any]) -> list[str]:
    """Return lines that describe the machine and its rates in this run."""
    machine = result["machine"]
    lines = [
        f"{result['shape']}, random weights, {result.get('format', BF16)}, {result['threads']} threads, "
        f"{len(result['rounds'])} rounds, "
        f"{result['date']}; {machine['processor']}, {machine['processors']} processors, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}; {', '.join(machine['instructions'])}"
    ]
    if not result["rounds"]:
        return lines
    rates = [one["machine"] for one in result["rounds"]]
    parts = [f"reads {_spread([one['read'] / 1e9 for one in rates])} GB/s"]
    for key, name in RATES.items():
        values = [one[key] / 1e9 for one in rates if one.get(key) is not None]
        parts += [f"{name} {_spread(values)} GFLOP/s"] if values else []
    busy = max(one["busy_before"] for one in result["rounds"])
    lines.append(f"limits from this run: {'; '.join(parts)}")
    lines.append(f"others used at most {busy:.0%} of the processors when a round began")
    return lines


def blocks_of(result: dict[str, Any]) -> Iterable[Block]:
    blocks = (make(result) for make in (rate_block, weights_block, context_block, serving_block, cold_start_block))
    return (block for block in blocks if block[1])


def print_report(result: dict[str, Any]) -> None:
    console = Console(width=200)
    for heading, lines in blocks_of(result):
        table = Table()
        for index, name in enumerate(heading):
            table.add_column(name, justify="left" if index < 2 else "right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for text in machine_lines(result):
        console.print(text, markup=False, highlight=False)


def markdown(result: dict[str, Any]) -> str:
    parts = ["\n".join(machine_lines(result))]
    for heading, lines in blocks_of(result):
        table = [heading, ["---"] * len(heading), *lines]
        parts.append("\n".join(f"| {' | '.join(cell.strip() for cell in line)} |" for line in table))
    return "\n\n".join(parts)


def _spread(values: Sequence[float] | None, digits: int | None = None) -> str:
    """Format the median and the range of values."""
    if not values:
        return "-"
    median, low, high = (_number(one, digits) for one in (statistics.median(values), min(values), max(values)))
    return median if len(values) == 1 else f"{median} ({low}-{high})"


def _number(value: float, digits: int | None = None) -> str:
    if digits is None:
        digits = 0 if value >= 100 else 1
    return f"{value:,.{digits}f}"
