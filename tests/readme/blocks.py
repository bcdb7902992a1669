"""The commands and Python programs in README.md, taken from its fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Return the lines of the shell blocks, in order, with their comments. A line that ends in a backslash goes on."""
    return [line for block in blocks("bash") for line in block.replace("\\\n", "").splitlines() if line.strip()]


def without_comment(command: str) -> str:
    return re.sub(r"\s+#.*", "", command)
