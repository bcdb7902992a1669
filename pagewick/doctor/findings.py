"""The result of a check: one line, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """level: ok; note, if everything works but the user should know; problem, if something does not work as it should.

    subject: one or two words. fix: what the user can do; empty if nothing is needed.
    """

    level: Level
    subject: str
    text: str
    fix: str = ""


ok, note, problem = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "problem")


def format_memory(num_bytes: float) -> str:
    """Format a size of memory, such as `1.5 GiB` or `320 MiB`; units are powers of 1024."""
    for power, unit in ((40, "TiB"), (30, "GiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    amount, unit = (num_bytes / 2**20, "MiB") if num_bytes >= 2**20 else (num_bytes / 2**10, "KiB")
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.1f} {unit}"
