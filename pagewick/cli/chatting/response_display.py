"""ResponseDisplay: one response on the screen, its thoughts first, and a line of statistics at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

from pagewick.cli.chatting.conversation import Piece, ResponseEnd
from pagewick.cli.chatting.markdown_view import LiveRegion, MarkdownView
from pagewick.cli.terminal_text import harmless


class View(Protocol):
    """Shows a text that arrives in pieces."""

    def feed(self, text: str) -> None: ...
    def finish(self) -> None: ...


class PlainView:
    """Shows the text unchanged, on lines of its own."""

    def __init__(self, console: Console, style: str | None = None) -> None:
        self._console = console
        self._style = style
        self._last = "\n"

    def feed(self, text: str) -> None:
        self._last = text[-1:] or self._last
        self._print(harmless(text))

    def finish(self) -> None:
        if self._last != "\n":
            self._print("\n")

    def _print(self, text: str) -> None:
        self._console.print(text, style=self._style, end="", markup=False, soft_wrap=True, emoji=False)


class FoldedThoughts:
    """Shows one line in place of the thoughts: how long they have taken so far, and how long they took in the end."""

    def __init__(self, console: Console, *, is_live: bool, clock: Callable[[], float]) -> None:
        self._console = console
        self._region = LiveRegion(console)
        self._is_live = is_live
        self._clock = clock
        self._start = clock()

    def feed(self, text: str) -> None:
        if self._is_live:
            self._region.show([], [self._dim(f"Thinking ... {self._clock() - self._start:.0f} s")])

    def finish(self) -> None:
        line = self._dim(f"Thought for {self._clock() - self._start:.1f} s; /thoughts shows it.")
        if self._is_live:
            self._region.show([line, ""], [])
        else:
            self._region.write(f"{line}\n\n")

    def _dim(self, text: str) -> str:
        return text if self._console.color_system is None else f"\x1b[2m{text}\x1b[0m"


class ResponseDisplay:
    """Shows the pieces of one response. is_plain: without Markdown and without moving the cursor."""

    def __init__(
        self,
        console: Console,
        *,
        is_plain: bool,
        show_thoughts: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        is_live = not is_plain and console.is_terminal
        self._console = console
        self._clock = clock
        self._views: dict[str, Callable[[], View]] = {
            "text": lambda: PlainView(console) if is_plain else MarkdownView(console, is_live=is_live),
            "thoughts": lambda: (
                PlainView(console, "dim") if show_thoughts else FoldedThoughts(console, is_live=is_live, clock=clock)
            ),
        }
        self._kind = ""
        self._view: View | None = None
        self._start = clock()
        self._first: float | None = None

    def show(self, piece: Piece) -> None:
        if self._first is None:
            self._first = self._clock()
        if piece.kind != self._kind:
            self.finish()
            self._kind, self._view = piece.kind, self._views[piece.kind]()
        assert self._view is not None, "a kind has a view"
        self._view.feed(piece.text)

    def finish(self) -> None:
        """Complete what is on the screen, and leave the cursor at the start of a line."""
        if self._view is not None:
            self._view.finish()
        self._view, self._kind = None, ""

    def statistics(self, end: ResponseEnd) -> str | None:
        """Describe how fast the response came; None if there was none."""
        if self._first is None:
            return None
        until_first, after = self._first - self._start, self._clock() - self._first
        if end.num_tokens is None:
            return f"first after {until_first:.2f} s, all after {until_first + after:.2f} s"
        line = f"{end.num_tokens} tokens, first after {until_first:.2f} s"
        if end.num_tokens > 1 and after > 0:
            line += f", then {(end.num_tokens - 1) / after:.0f} per second"
        return line
