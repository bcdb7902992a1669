"""The bar or the lines that a user sees during a long transfer."""

from __future__ import annotations

import io

import pytest

from pagewick.weights.progress import BarProgress, LineProgress, Progress, default_progress, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_540_000, "1.5 MB"), (2 * 10**15, "2000.0 TB")],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_line_for_every_tenth_once() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.start("downloading m", 1000, 150)
    for _ in range(85):
        progress.advance(10)
    progress.stop()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "downloading m: 1.0 kB, 150 B of it already here"
    assert lines[1] == "downloading m: 20% (200 B of 1.0 kB)"
    assert [line.split()[2] for line in lines[1:]] == [f"{tenth}0%" for tenth in range(2, 11)]


def test_going_back_does_not_repeat_lines() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.start("x", 100)
    for step in (50, -50, 50, 49):
        progress.advance(step)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["100", "50%", "90%"]


def test_a_transfer_of_no_bytes() -> None:
    progress = LineProgress(io.StringIO())
    progress.start("x", 0)
    progress.advance(0)


def test_the_bar_appears_and_disappears() -> None:
    stream = Terminal()
    progress = BarProgress(stream)
    progress.start("downloading m", 2000, 1000)
    progress.advance(500)
    progress.stop()
    assert "downloading m" in stream.getvalue()
    assert "1.5/2.0 kB" in stream.getvalue()


def test_the_stream_decides_between_bar_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    assert isinstance(default_progress(Terminal()), BarProgress)
    assert isinstance(default_progress(io.StringIO()), LineProgress)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    assert type(default_progress(Terminal())) is Progress
