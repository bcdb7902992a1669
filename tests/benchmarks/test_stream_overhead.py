"""The benchmark of streamed tokens runs against a server, and its engine sends what a stream shows."""

from __future__ import annotations

from click.testing import CliRunner

from benchmarks.stream_overhead import main


def test_every_number_of_streams_has_a_row() -> None:
    options = "--streams 1 --streams 3 --tokens 60 --period-us 500 --route completions"
    result = CliRunner().invoke(main, options.split(), catch_exceptions=False)
    head, *rows = result.output.splitlines()
    assert head.split()[0] == "completions"
    assert [row.split()[0] for row in rows] == ["1", "3"]
    # Tokens per second, tokens per event, and microseconds of three processes.
    figures = [[float(figure.replace(",", "")) for figure in row.split()[1:]] for row in rows]
    assert all(len(row) == 5 and row[0] > 0 and row[1] > 0 for row in figures)
