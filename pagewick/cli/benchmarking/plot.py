"""Plots of speed over concurrency: bars in a terminal, and curves in an SVG file that any browser shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from pagewick.cli.benchmarking.measurement import METRICS, Metric, Runs
from pagewick.cli.replacing_file import write_whole
from pagewick.cli.terminal_text import harmless
from pagewick.errors import ConfigError

_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_SHOWN = ("output tokens", "first token, p50", "per output token, p50")
# In pixels: the width of a panel's curves, the height of a panel, and the room around the curves.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 620, 200, 80, 40, 50
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")


@dataclass(frozen=True, slots=True)
class Level:
    """The results of all engines or servers with one number of requests at the same time."""

    concurrency: int
    results: Sequence[Runs]


@dataclass(frozen=True, slots=True)
class Panel:
    """One number over concurrency. curves: label -> value at each level, None where there is none."""

    title: str
    curves: dict[str, list[float | None]]

    @property
    def highest(self) -> float:
        return max((value for curve in self.curves.values() for value in curve if value is not None), default=0.0)


def panels_of(levels: Sequence[Level]) -> list[Panel]:
    """Return a panel for each number that was measured at some level."""
    panels: list[Panel] = []
    for metric in (metric for metric in METRICS if metric.name in _SHOWN):
        labels = [result.label for result in levels[0].results]
        curves = {
            label: [_value(metric, level.results[index]) for level in levels] for index, label in enumerate(labels)
        }
        unit = "per second" if metric.is_rate else "ms"
        panel = Panel(f"{metric.name}, {unit}", curves)
        panels += [panel] if panel.highest else []
    return panels


def curve_of(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """Return the numbers of all levels as plain data."""
    return [
        {"concurrency": level.concurrency, "results": {one.label: one.metrics() for one in level.results}}
        for level in levels
    ]


def print_plot(console: Console, levels: Sequence[Level]) -> None:
    """Print a bar for each level, in a block for each number."""
    width = max(len(label) for label in [result.label for result in levels[0].results])
    for panel in panels_of(levels):
        console.print(f"\n{panel.title}, by the number of requests at the same time", markup=False)
        for index, level in enumerate(levels):
            for label, curve in panel.curves.items():
                name = f"{harmless(label):{width}} " if len(panel.curves) > 1 else ""
                value = curve[index]
                text = "-" if value is None else f"{_bar(value / panel.highest)} {value:,.1f}"
                console.print(f"{level.concurrency:>5}  {name}{text}", markup=False)


def write_svg(path: Path, title: str, levels: Sequence[Level]) -> None:
    """Write the curves to a file. Raises ConfigError if that fails."""
    try:
        write_whole(path, svg_of(title, levels).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --plot") from None


def svg_of(title: str, levels: Sequence[Level]) -> str:
    """Return the curves as an SVG document, one panel below the other."""
    panels = panels_of(levels)
    size = f'width="{_WIDTH + 2 * _LEFT}" height="{_TOP + len(panels) * (_HEIGHT + _TOP + _BOTTOM)}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        lines += _panel_lines(panel, levels, top=_TOP + index * (_HEIGHT + _TOP + _BOTTOM) + _TOP)
    return "\n".join([*lines, "</svg>", ""])


def _panel_lines(panel: Panel, levels: Sequence[Level], top: int) -> Iterator[str]:
    bottom = top + _HEIGHT
    limit = _round_up(panel.highest)
    # Levels double, so that equal distances are a logarithmic axis.
    places = [_LEFT + _WIDTH * index / max(len(levels) - 1, 1) for index in range(len(levels))]
    yield f'<text x="{_LEFT}" y="{top - 12}" font-weight="bold">{escape(panel.title)}</text>'
    for quarter in range(5):
        y = bottom - _HEIGHT * quarter / 4
        yield f'<line x1="{_LEFT}" y1="{y:g}" x2="{_LEFT + _WIDTH}" y2="{y:g}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:g}" text-anchor="end">{limit * quarter / 4:,g}</text>'
    for level, x in zip(levels, places, strict=True):
        yield f'<text x="{x:g}" y="{bottom + 18}" text-anchor="middle">{level.concurrency}</text>'
    middle = _LEFT + _WIDTH / 2
    yield f'<text x="{middle:g}" y="{bottom + 36}" text-anchor="middle">requests at the same time</text>'
    for index, (label, curve) in enumerate(panel.curves.items()):
        color = _COLORS[index % len(_COLORS)]
        points = [(x, bottom - _HEIGHT * y / limit, y) for x, y in zip(places, curve, strict=True) if y is not None]
        path = " ".join(f"{x:g},{y:.1f}" for x, y, _ in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        for x, y, value in points:
            tip = f"<title>{escape(label)}: {value:,.1f}</title>"
            yield f'<circle cx="{x:g}" cy="{y:.1f}" r="4" fill="{color}">{tip}</circle>'
        if len(panel.curves) > 1:
            x, y = _LEFT + _WIDTH + 8, top + 16 * index + 4
            yield f'<text x="{x}" y="{y}" fill="{color}">{escape(label)}</text>'


def _value(metric: Metric, result: Runs) -> float | None:
    """Return the median of the rounds, a time in milliseconds."""
    spread = result.spread(*metric.path)
    return None if spread is None else spread.median * (1 if metric.is_rate else 1000)


def _bar(share: float) -> str:
    whole, part = divmod(round(share * _BAR_WIDTH * 8), 8)
    return ("█" * whole + _EIGHTHS[part]).rstrip() or _EIGHTHS[1]


def _round_up(value: float) -> float:
    """Return the next number of the form 1, 2, 4 or 8 times a power of ten."""
    power = 1e-9
    while power * 8 < value:
        power *= 10
    return next(power * step for step in (1, 2, 4, 8) if power * step >= value)
