"""MarkdownView: a response rendered as Markdown while it arrives.

A finished block (a paragraph, a list, a table, a code block) is printed once. Only unfinished blocks, the last one or
two, are live: their lines are written again when they change, and once they are taller than the screen, their first
lines are final too. So the
terminal's own scrolling works, and nothing flickers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

from pagewick.cli.terminal_text import harmless

if TYPE_CHECKING:
    from markdown_it.token import Token

MIN_PAINT_INTERVAL_S = 0.05
# Painting takes at most this share of the time, however long the block is: the model may run on the same processor.
MAX_PAINT_SHARE = 0.1
CODE_THEME = "ansi_dark"

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\")

# Kinds of blocks that no further line continues, and those that none continues behind a blank line.
_CLOSED = ("heading_open", "fence", "hr")
_CLOSED_BY_BLANK_LINE = ("paragraph_open", "blockquote_open", "table_open")


class LiveRegion:
    """The last lines on the console's terminal, which may still change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[str] = []

    def show(self, final: Sequence[str], live: Sequence[str]) -> None:
        """Replace the live lines: `final` lines stay, `live` ones are replaced next time. Lines must fit the width."""
        lines = [*final, *live]
        num_same = 0
        for old, new in zip(self._lines, lines, strict=False):
            if old != new:
                break
            num_same += 1
        num_rows = sum(self._num_rows(line) for line in self._lines[num_same:])
        up = f"\x1b[{num_rows}A" if num_rows else ""
        # Each line is erased from the end of its new text on; erasing it before would flicker.
        text = "".join(f"{line}\x1b[K\n" for line in lines[num_same:])
        below = "\x1b[J" if num_rows > len(lines) - num_same else ""
        if up or text:
            self.write(f"{up}\r{text}{below}")
        self._lines = list(live)

    def write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _num_rows(self, line: str) -> int:
        """Return how many rows a line takes: several if the terminal has become narrower."""
        return max(1, -(-cell_len(_ESCAPES.sub("", line)) // max(self._console.size.width, 1)))


class MarkdownView:
    """Shows Markdown on a console as it arrives. Without is_live, blocks appear when they are finished."""

    def __init__(
        self, console: Console, *, is_live: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console = console
        self._is_live = is_live
        self._clock = clock
        self._next_paint = 0.0
        # References are shown as they are written: their definitions may come long after the block is final. HTML is
        # shown as text, because rich would omit it.
        parser = MarkdownIt("commonmark", {"html": False})
        self._parser = parser.enable(["strikethrough", "table"]).disable("reference")
        self._region = LiveRegion(console)
        self._text = ""
        self._is_first = True
        # Number of lines at the top of _text that are final already.
        self._num_final = 0

    def feed(self, text: str) -> None:
        self._text += harmless(text)
        if self._clock() >= self._next_paint:
            start = self._clock()
            self._paint(is_end=False)
            took = self._clock() - start
            self._next_paint = start + max(MIN_PAINT_INTERVAL_S, took / MAX_PAINT_SHARE)

    def finish(self) -> None:
        """End the text: all of it is final."""
        self._paint(is_end=True)
        self._text, self._num_final = "", 0

    def _paint(self, *, is_end: bool) -> None:
        blocks = self._blocks()
        num_finished = len(blocks) if is_end else self._num_finished(blocks)
        final: list[str] = []
        for block in blocks[:num_finished]:
            final += self._render(block, is_first=self._is_first)
            self._is_first = False
        num_printed = min(self._num_final, len(final))
        final, self._num_final = final[num_printed:], self._num_final - num_printed
        live: list[str] = []
        if unfinished := blocks[num_finished:]:
            self._text = "\n".join(self._text.split("\n")[_start(unfinished[0]) :])
            if self._is_live:
                live = self._live_lines(unfinished)
                num_surplus = max(len(live) - max(self._console.size.height - 1, 1), 0)
                final, live = final + live[:num_surplus], live[num_surplus:]
                self._num_final += num_surplus
        if self._is_live:
            self._region.show(final, live)
        else:
            self._region.write("".join(f"{line}\n" for line in final))

    def _live_lines(self, blocks: Sequence[list[Token]]) -> list[str]:
        """Return the lines of unfinished blocks that are not final yet."""
        lines = [self._render(block, is_first=self._is_first and place == 0) for place, block in enumerate(blocks)]
        return [line for block in lines for line in block][self._num_final :]

    def _num_finished(self, blocks: Sequence[list[Token]]) -> int:
        """Return how many blocks stay as they are, whatever text follows.

        The last one does not. The one before may not either if the last one consists of the last line, whose end is
        missing: three backquotes open a block of code until another one follows, and `2` is a text until a full stop
        makes it the next item of a list.
        """
        if len(blocks) < 2:
            return 0
        lines = self._text.split("\n")
        before, last = blocks[-2:]
        # A table is one only with its second line.
        is_settled = _start(last) + (last[0].type == "table_open") < len(lines) - 1
        is_apart = not lines[_start(last) - 1].strip()
        if is_settled or before[0].type in _CLOSED or (is_apart and before[0].type in _CLOSED_BY_BLANK_LINE):
            return len(blocks) - 1
        return len(blocks) - 2

    def _blocks(self) -> list[list[Token]]:
        """Parse the text; return the tokens of each top-level block."""
        blocks: list[list[Token]] = [[]]
        for token in self._parser.parse(self._text):
            for child in token.children or ():
                # Models intend the line breaks that they write.
                child.type = "hardbreak" if child.type == "softbreak" else child.type
            blocks[-1].append(token)
            if token.level == 0 and token.nesting <= 0:
                blocks.append([])
        return [block for block in blocks if block]

    def _render(self, block: list[Token], *, is_first: bool) -> list[str]:
        """Return a block's lines, after an empty line that separates it from the previous block."""
        markdown = Markdown("", code_theme=CODE_THEME, hyperlinks=False)
        markdown.parsed = block
        width = max(self._console.size.width - 1, 1)
        with self._console.capture() as capture:
            self._console.print(markdown, width=width)
        lines = [line.rstrip() for line in capture.get().split("\n")]
        shown = [index for index, line in enumerate(lines) if _ESCAPES.sub("", line).strip()]
        lines = lines[shown[0] : shown[-1] + 1] if shown else []
        return lines if is_first else ["", *lines]


def _start(block: list[Token]) -> int:
    """Return the line of the text at which a block begins."""
    place = block[0].map
    assert place is not None, "a top-level block has a place"
    return place[0]
