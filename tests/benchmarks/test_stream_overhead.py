"""The benchmark of streamed tokens runs against a server, and its engine sends what a stream shows."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.stream_overhead import main


@pytest.mark.parametrize("count", [1, 2])
def test_every_number_of_streams_has_a_row(count: int) -> None:
    options = f"--streams 1 --streams 3 --tokens 60 --period-us 500 --route completions --api-server-count {count}"
    result = CliRunner().invoke(main, options.split(), catch_exceptions=False)
    head, *rows = result.output.splitlines()
    assert head.split()[0] == "completions"
    assert [row.split()[0] for row in rows] == ["1", "3"]
    # Tokens per second, tokens per event, and microseconds of four kinds of processes.
    figures = [[float(figure.replace(",", "")) for figure in row.split()[1:]] for row in rows]
    assert all(len(row) == 6 and row[0] > 0 and row[1] > 0 for row in figures)
