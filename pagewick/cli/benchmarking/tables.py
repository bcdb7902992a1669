"""Measurements as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pagewick.cli.benchmarking.measurement import METRICS, Metric, Runs, Spread, paired_ratios
from pagewick.cli.terminal_text import harmless

_BETTER = "better"
_ANY_WIDTH = 10**6
_STATISTICS = ("mean", "p50", "p90", "p99")
_TIMES = (
    ("until the first token", "time_to_first_token"),
    ("per output token", "time_per_output_token"),
    ("gap between two pieces", "gap_between_pieces"),
    ("whole request", "end_to_end"),
)


def print_runs(console: Console, title: str, results: Sequence[Runs]) -> None:
    """Print the numbers of all side by side, the ratios, the distributions of times, and the errors."""
    _print_overview(console, title, results)
    for result in results:
        _print_times(console, result)
    for result in results:
        _print_remarks(console, result)


def print_rates(console: Console, title: str, results: Mapping[str, Mapping[str, float]]) -> None:
    """Print the tokens per second of fixed measurements: name -> median, low and high."""
    rows = [
        [name, f"{rates['median']:,.1f}", f"{rates['low']:,.1f} - {rates['high']:,.1f}"]
        for name, rates in results.items()
    ]
    _print_table(console, title, ["measurement", "tokens/s", "lowest - highest"], rows)


def _print_table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where it would be too wide to show whole words, print a line for each cell."""
    # Texts, because a model's name may look like rich's markup.
    table = Table(title=Text(harmless(title)))
    for name in names:
        table.add_column(Text(name), justify="left" if name in (names[0], _BETTER) else "right")
    for row in rows:
        table.add_row(*row)
    widest = console.options.update(max_width=_ANY_WIDTH)
    if Measurement.get(console, widest, table).minimum <= console.width:
        console.print(table)
        return
    console.print(Text(harmless(title)), soft_wrap=True)
    for first, *cells in rows:
        console.print(Text(first), soft_wrap=True)
        for name, cell in zip(names[1:], cells, strict=True):
            console.print(Text(f"  {name}: {cell}"), soft_wrap=True)


def _print_overview(console: Console, title: str, results: Sequence[Runs]) -> None:
    first, *others = results
    names = ["median of rounds (lowest - highest)", *([_BETTER] if others else [])]
    names += [result.label for result in results] + [f"{first.label} / {other.label}" for other in others]
    rows = []
    for metric in METRICS:
        cells = [_number(metric, result.spread(*metric.path)) for result in results]
        ratios = [_ratio(paired_ratios(first.rounds, other.rounds, metric)) for other in others]
        better = ["higher" if metric.is_rate else "lower"] if others else []
        rows.append([metric.name, *better, *cells, *ratios])
    _print_table(console, title, names, rows)


def _print_times(console: Console, result: Runs) -> None:
    rows = []
    for title, name in _TIMES:
        spreads = [result.spread(name, statistic) for statistic in _STATISTICS]
        rows.append([title, *("-" if one is None else f"{one.median * 1000:,.1f}" for one in spreads)])
    _print_table(console, f"{result.label}: milliseconds, median of rounds", ["time", *_STATISTICS], rows)


def _print_remarks(console: Console, result: Runs) -> None:
    first = result.rounds[0]
    num_errors = sum(result.errors.values())
    num_requests = num_errors + sum(one.num_finished for one in result.rounds)
    if first.num_prompt_tokens is None or first.num_output_tokens is None or not first.num_finished:
        line = "the server does not count tokens, so there are no token rates"
    else:
        prompt, output = (count / first.num_finished for count in (first.num_prompt_tokens, first.num_output_tokens))
        line = f"{prompt:,.0f} prompt tokens and {output:,.0f} output tokens each"
    console.print(f"{result.label}: {num_requests} requests, {line}; {num_errors} failed", markup=False)
    for kind, count in sorted(result.errors.items(), key=lambda item: -item[1]):
        console.print(f"  {count} x {kind}", style="red", markup=False)


def _number(metric: Metric, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    scale, unit = (1, "/s") if metric.is_rate else (1000, "ms")
    numbers = [f"{value * scale:,.1f}" for value in (spread.median, spread.low, spread.high)]
    return f"{numbers[0]} {unit} ({numbers[1]} - {numbers[2]})"


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.3f} ({spread.low:.3f} - {spread.high:.3f})"
