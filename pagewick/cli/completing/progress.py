"""How far a batch is, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Gets how many tokens a finished request has made.
OnFinished = Callable[[int], None]


@contextmanager
def progress_bar(total: int | None, num_done: int) -> Iterator[OnFinished]:
    """total: how many there are, if it is known. num_done: those of an earlier run."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total, completed=num_done, speed="")
        start, num_tokens = time.perf_counter(), 0

        def on_finished(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            speed = num_tokens / max(time.perf_counter() - start, 1e-9)
            progress.update(task, advance=1, speed=f"{speed:,.0f} tokens/s")

        yield on_finished
