"""`pagewick bench --plot`: coordinates by hand, bars, and the command on stand-in servers and a scripted engine."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pagewick.cli import cli
from pagewick.cli.benchmarking.measurement import RequestTiming, Runs, Summary
from pagewick.cli.benchmarking.plot import Level, _round_up, panels_of, print_plot, svg_of, write_svg
from pagewick.cli.benchmarking.saved import save_report
from pagewick.cli.benchmarking.tables import print_rates, print_runs
from pagewick.cli.benchmarking.workload import Workload
from pagewick.errors import ConfigError
from tests.cli.stand_in_server import StandInServer

SVG = "{http://www.w3.org/2000/svg}"


def level(concurrency: int, *rates: float | None) -> Level:
    """Results in which each label has a rate of output tokens, and a first token after 1 / rate seconds."""
    results = []
    for index, rate in enumerate(rates):
        timing = RequestTiming(1 / (rate or 1), 2.0, [], 10, None if rate is None else round(rate))
        results.append(Runs(f"s<{index}>", [Summary.of([timing], 1.0)]))
    return Level(concurrency, results)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 16]), (17, [1, 2, 4, 8, 16, 17])],
)
def test_levels_double_up_to_the_largest(largest: int, expected: list[int]) -> None:
    levels = list(Workload(concurrency=largest, num_prompts=10).levels())
    assert [one.concurrency for one in levels] == expected
    assert [one.num_prompts for one in levels] == [min(10, 4 * number) for number in expected[:-1]] + [10]


@pytest.mark.parametrize(("value", "limit"), [(0.9, 1), (1, 1), (3, 4), (5, 8), (81, 100), (1250, 2000)])
def test_an_axis_ends_at_a_round_number(value: float, limit: float) -> None:
    assert _round_up(value) == pytest.approx(limit)


def test_the_points_of_a_curve_are_in_proportion() -> None:
    root = ElementTree.fromstring(svg_of("a <title>", [level(1, 20.0), level(2, 40.0), level(4, None)]))
    assert next(text.text for text in root.iter(f"{SVG}text")) == "a <title>"
    first, *_ = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in first.attrib["points"].split()]
    lines = [float(line.attrib["y1"]) for line in root.iter(f"{SVG}line")][:5]
    # The axis ends at 40, the third level has no value, and levels have equal distances.
    assert [y for _, y in points] == [(lines[0] + lines[4]) / 2, lines[4]]
    assert [x for x, _ in points] == [80, 80 + 620 / 2]
    assert "s<0>: 40.0" in [title.text for title in root.iter(f"{SVG}title")]


def test_a_number_that_no_server_counts_has_no_panel() -> None:
    assert [panel.title for panel in panels_of([level(1, None)])] == ["first token, p50, ms"]


def test_bars_are_as_long_as_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_plot(Console(highlight=False, width=120), [level(1, 10.0, 20.0), level(8, 40.0, None)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "output tokens, per second, by the number of requests at the same time"
    assert lines[2:6] == [
        f"    1  s<0> {'█' * 10} 10.0", f"    1  s<1> {'█' * 20} 20.0", f"    8  s<0> {'█' * 40} 40.0", "    8  s<1> -",
    ]  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInServer]:
    monkeypatch.setattr(os, "setpriority", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PAGEWICK_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with StandInServer().running() as server:
        yield server


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments])


def test_the_command_draws_every_level(server: StandInServer, tmp_path: Path) -> None:
    small = ("--num-prompts", "4", "--concurrency", "3", "--input-len", "4", "--output-len", "4")
    result = bench("--url", server.url, *small, "--repeats", "1", "--plot", str(tmp_path / "out.svg"))
    assert result.exit_code == 0, result.output
    assert "by the number of requests at the same time\n    1  █" in result.stdout
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    # An axis of rates may have a mark of this name, too.
    assert [text.text for text in root.iter(f"{SVG}text")].count("3") >= len(list(root.iter(f"{SVG}polyline"))) > 0
    as_json = bench("--url", server.url, *small, "--repeats", "1", "--plot", "-", "--json")
    report = json.loads(as_json.stdout)
    assert [one["concurrency"] for one in report["curve"]] == [1, 2, 3]
    assert report["metrics"] == next(iter(report["curve"][-1]["results"].values()))
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("name", ["out.png", "out", "svg"])
def test_a_plot_is_an_svg_file(server: StandInServer, tmp_path: Path, name: str) -> None:
    result = bench("--url", server.url, "--plot", str(tmp_path / name))
    assert result.exit_code == 2
    assert "the name must end in .svg" in " ".join(result.stderr.split())
    assert server.requests == []
    assert not (tmp_path / name).exists()


def test_a_rate_has_no_curve_over_concurrency() -> None:
    result = bench("--plot", "-", "--request-rate", "3", "--url", "http://127.0.0.1:9/v1")
    assert result.exit_code == 2
    assert "--request-rate ignores their number" in " ".join(result.stderr.split())


def test_a_report_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for write in (lambda path: save_report(path, {}), lambda path: write_svg(path, "", [level(1, 20.0)])):
            with pytest.raises(ConfigError, match=r"cannot write .*: File too large"):
                write(tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [20, 40, 80])
def test_tables_show_every_number_on_any_terminal(width: int) -> None:
    output = io.StringIO()
    print_runs(Console(file=output, width=width), "a title", level(1, 20.0, 25.0).results)
    text = output.getvalue()
    assert "…" not in text and "20.0 /s" in text and "0.800" in text
    output = io.StringIO()
    print_rates(Console(file=output, width=width), "m", {"decode": {"median": 1234.5, "low": 1.0, "high": 2345.6}})
    assert "…" not in output.getvalue() and "1,234.5" in output.getvalue() and "2,345.6" in output.getvalue()
