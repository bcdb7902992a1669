"""Views of a chat: Markdown that grows, on a small simulated terminal; thoughts; the line of statistics."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pagewick.cli.chatting.conversation import Piece, ResponseEnd
from pagewick.cli.chatting.markdown_view import MarkdownView
from pagewick.cli.chatting.response_display import ResponseDisplay
from pagewick.cli.terminal_text import harmless

DOCUMENT = """# Title

A paragraph with **bold** text,
a break, <b>HTML</b> and `code`.

```python
def f(x):
    return "你好 <&>"  # text

```

1. one
2. two
   - nested

     with a paragraph

| 你好 | b |
|---|--:|
| c | ddd |

Text before
===

> quoted

[1]: http://example.org/reference

The [end](http://example.org)."""


class Screen:
    """A simulated terminal with what views need: rows that scroll away at the top, a cursor, erasing."""

    def __init__(self, width: int = 40, height: int = 10) -> None:
        self.width, self.height = width, height
        self.rows = [""]
        self.row = 0
        self.is_cursor_shown = True
        self.num_lines_written = 0

    @property
    def top(self) -> int:
        """The first row that is on the screen: those above it cannot be reached any more."""
        return max(len(self.rows) - self.height, 0)

    def write(self, data: str) -> int:
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", data):
            self._apply(part)
        return len(data)

    def flush(self) -> None:
        pass

    def _apply(self, part: str) -> None:
        if part == "\n":
            self.row += 1
            self.num_lines_written += 1
            if self.row == len(self.rows):
                self.rows.append("")
            self.column = 0
        elif part == "\r":
            self.column = 0
        elif re.fullmatch(r"\x1b\[\d+A", part):
            self.row -= int(part[2:-1])
            assert self.row >= self.top, "the cursor is moved into rows that have scrolled away"
        elif part == "\x1b[K":
            self.rows[self.row] = self._head(self.column)
        elif part == "\x1b[J":
            self.rows[self.row :] = [self._head(self.column)]
        elif part.startswith("\x1b[?25"):
            self.is_cursor_shown = part.endswith("h")
        elif not part.startswith("\x1b"):
            assert "\x1b" not in part
            row = self.rows[self.row]
            self.rows[self.row] = self._head(self.column) + part + row[self.column + len(part) :]
            self.column += len(part)
            assert cell_len(self.rows[self.row]) <= self.width, "a line is wrapped"

    def _head(self, column: int) -> str:
        return self.rows[self.row][:column]

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows).rstrip("\n")

    column = 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console_on(screen: Screen) -> Console:
    return Console(
        file=screen,  # type: ignore[arg-type]
        force_terminal=True, color_system="standard", width=screen.width, height=screen.height, highlight=False,
    )  # fmt: skip


def shown(pieces: list[str], *, width: int = 40, height: int = 10) -> Screen:
    screen = Screen(width, height)
    ticks = iter(range(10**9))
    view = MarkdownView(console_on(screen), clock=lambda: float(next(ticks)))
    for piece in pieces:
        view.feed(piece)
    view.finish()
    return screen


def cut(text: str, places: set[int]) -> list[str]:
    ends = sorted({place for place in places if place < len(text)} | {len(text)})
    starts = [0, *ends[:-1]]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def shown_at_once(pieces: list[str], *, width: int = 20, height: int = 200) -> str:
    """Return what the screen shows if the view paints after every piece."""
    screen, clock = Screen(width, height), Clock()
    view = MarkdownView(console_on(screen), clock=clock)
    for piece in pieces:
        clock.now += 1
        view.feed(piece)
    view.finish()
    return screen.text


@given(
    st.lists(
        st.sampled_from(
            [*"ab*`#|->=12. \n\n", "```", "~~~", "|a|b|", "\n|-|-|", "1. ", "- ", "* ", "    ", "\n\n", "> "]
        ),
        max_size=30,
    )
)
@example(["aaaaaaa", "\n", "```", "a", "`"])
@example(["a\n***", "a"])
@example(["a\n#", "#a"])
@example(["a\n|a|b|\n|-|-|", "a"])
@example(["1. a\n\n2", ".", " b"])
@example(["> a\n***", "a"])
@example(["- a\n#", "a"])
@example(["|a|b|\n|-|-|\n***", "a"])
@example(["    a\n\n ", "b"])
@settings(max_examples=100, deadline=None)
def test_any_text_is_shown_alike_however_it_arrives(parts: list[str]) -> None:
    assert shown_at_once(parts) == shown_at_once(["".join(parts)])
    assert shown_at_once(list("".join(parts))) == shown_at_once(["".join(parts)])


@given(st.sets(st.integers(1, len(DOCUMENT))), st.integers(24, 80), st.integers(60, 90))
@example(set(range(1, len(DOCUMENT))), 40, 60)
@settings(max_examples=25, deadline=None)
def test_the_final_screen_does_not_depend_on_how_the_text_arrives(places: set[int], width: int, height: int) -> None:
    """The screen is taller than any block, so that no block is final before it is finished."""
    assert shown(cut(DOCUMENT, places), width=width, height=height).text == shown([DOCUMENT], width=width).text


def test_every_kind_of_block_is_shown() -> None:
    text = shown(list(DOCUMENT), width=60, height=40).text
    for part in (
        "Title", "bold", "<b>HTML</b>", "code", 'return "你好 <&>"  # text', "1 one", "nested", "ddd", "quoted",
        "http://example.org/reference", "end (http://example.org)",
    ):  # fmt: skip
        assert part in text
    assert "text,\na break" in text
    assert "**" not in text
    assert "```" not in text


@given(st.lists(st.sampled_from([*"ab*`#|-> \n\n", "```", "你", "[x](y)", "1. ", "- ", "    "]), max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_text_can_be_shown(parts: list[str]) -> None:
    """It shows no letter that the text lacks, and not more of any than the text has."""
    screen, text = shown(parts, width=20, height=8).text, "".join(parts)
    assert all(screen.count(letter) <= text.count(letter) for letter in "abxy你")


def test_a_block_taller_than_the_screen_scrolls() -> None:
    code = "```\n" + "\n".join(f"line {index}" for index in range(50)) + "\n```\n\nafter"
    screen = shown(list(code), height=8)
    assert [row.strip() for row in screen.text.split("\n")] == [
        *(f"line {index}" for index in range(50)), "", "after",
    ]  # fmt: skip


def test_unchanged_lines_are_not_written_again() -> None:
    paragraphs = [f"paragraph {index}\n\n" for index in range(20)]
    # Every line is written once when its first letter arrives, and once more when it is final.
    assert shown(paragraphs, height=30).num_lines_written <= 3 * 2 * len(paragraphs)


def test_without_a_terminal_only_finished_blocks_are_written() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, color_system=None)
    view = MarkdownView(console, is_live=False, clock=iter(range(99)).__next__)
    view.feed("one\n\ntw")
    assert file.getvalue() == "one\n"
    view.feed("o")
    view.finish()
    assert file.getvalue() == "one\n\ntwo\n"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9bc\r\nd\te\ud83d") == "a�[2Jb��c\nd\te�"
    screen = shown(["safe \x1b[31mtext\x1b]0;title\x07"])
    assert screen.text == "safe �[31mtext�]0;title�"


@pytest.mark.parametrize("is_plain", [True, False])
def test_thoughts_are_folded_into_one_line(is_plain: bool) -> None:
    screen, clock = Screen(60), Clock()
    display = ResponseDisplay(console_on(screen), is_plain=is_plain, show_thoughts=False, clock=clock)
    for piece in (Piece("thoughts", "hm"), Piece("thoughts", "hm"), Piece("text", "Yes"), Piece("text", "!")):
        clock.now += 1
        display.show(piece)
        if piece.kind == "thoughts" and not is_plain:
            assert screen.text == f"Thinking ... {clock.now - 1:.0f} s"
    display.finish()
    assert screen.text == "Thought for 2.0 s; /thoughts shows it.\n\nYes!"
    assert display.statistics(ResponseEnd(7)) == "7 tokens, first after 1.00 s, then 2 per second"
    assert display.statistics(ResponseEnd(None)) == "first after 1.00 s, all after 4.00 s"


def test_thoughts_are_shown_on_request() -> None:
    screen = Screen(60)
    display = ResponseDisplay(console_on(screen), is_plain=False, show_thoughts=True)
    display.show(Piece("thoughts", "hm **not bold**"))
    display.show(Piece("text", "**bold**"))
    display.finish()
    assert screen.text == "hm **not bold**\nbold"


def test_without_a_response_there_are_no_statistics() -> None:
    display = ResponseDisplay(console_on(Screen()), is_plain=True, show_thoughts=False)
    display.finish()
    assert display.statistics(ResponseEnd(0)) is None
