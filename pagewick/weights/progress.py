"""Progress of a long transfer: a bar on a terminal, a few plain lines anywhere else. Imports no torch."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID

_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


class Progress:
    """Told about a transfer of bytes: start, then advance from any thread, then stop, also after an error.

    This base class shows nothing.
    """

    def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Begin to show a transfer; `done_bytes` have arrived earlier."""

    def advance(self, num_bytes: int) -> None:
        """Count bytes that have arrived; negative if a file had to begin again."""

    def stop(self) -> None:
        """End, because the transfer is over or has failed."""


class BarProgress(Progress):
    """A bar with size, speed and remaining time, which disappears at the end."""

    def __init__(self, stream: TextIO) -> None:
        # Imported here, because that takes 80 ms and most starts show no bar.
        from rich import progress
        from rich.console import Console

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task: TaskID | None = None

    def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Show the bar."""
        self._task = self._bars.add_task(description, total=total_bytes, completed=done_bytes)
        self._bars.start()

    def advance(self, num_bytes: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.advance(self._task, num_bytes)

    def stop(self) -> None:
        """Remove the bar."""
        self._bars.stop()


class LineProgress(Progress):
    """A line at the start and one whenever another tenth is done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._description = ""
        self._total_bytes = self._done_bytes = self._tenths_shown = 0

    def start(self, description: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Write a line with the description and the size."""
        self._description, self._total_bytes, self._done_bytes = description, total_bytes, done_bytes
        self._tenths_shown = self._tenths()
        there = f", {format_bytes(done_bytes)} of it already here" if done_bytes else ""
        print(f"{description}: {format_bytes(total_bytes)}{there}", file=self._stream, flush=True)

    def advance(self, num_bytes: int) -> None:
        """Write a line if another tenth is done."""
        with self._lock:
            self._done_bytes += num_bytes
            if self._tenths() > self._tenths_shown:
                self._tenths_shown = self._tenths()
                done, total = format_bytes(self._done_bytes), format_bytes(self._total_bytes)
                line = f"{self._description}: {10 * self._tenths_shown}% ({done} of {total})"
                print(line, file=self._stream, flush=True)

    def _tenths(self) -> int:
        return 10 * self._done_bytes // max(self._total_bytes, 1)


def default_progress(stream: TextIO | None = None) -> Progress:
    """Choose a bar if the stream (stderr) is a terminal, else lines; HF_HUB_DISABLE_PROGRESS_BARS=1: nothing."""
    stream = stream or sys.stderr
    if is_true(os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")):
        return Progress()
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


def is_true(value: str | None) -> bool:
    """Whether the value of an environment variable switches something on, as huggingface_hub reads it."""
    return (value or "").upper() in _TRUE


def format_bytes(num_bytes: int) -> str:
    """Write a size such as `1.5 GB`; units are powers of 1000, as hubs and disks count."""
    power = 0
    while num_bytes >= 1000 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return f"{num_bytes} B" if power == 0 else f"{num_bytes / 1000**power:.1f} {_UNITS[power]}"
