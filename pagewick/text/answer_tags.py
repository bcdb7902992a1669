"""AnswerTags: the tags that a model puts around its answer. AnswerSplitter leaves them out.

</think>\\n\\n<response>\\nFour.\\n</response>\\n        text: "Four."
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from pagewick.outputs import PartKind
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tokenizer import Tokenizer

# A model has the first pair that its chat template mentions.
KNOWN_ANSWER_TAGS = (
    ("<response>", "</response>"),  # ERNIE 4.5 Thinking, Granite 3.3
    ("<answer>", "</answer>"),  # Hunyuan
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Command R7B and A
    ("<|START_TEXT|>", "<|END_TEXT|>"),  # Command A+
)
# These could be a user's.
_PLAIN_WORDS = ("<response>", "<answer>")
# Words by which templates are known whose models write tags that the templates do not mention.
_OTHER_SIGNS = {"<answer>": [("<|extra_0|>",)]}
# Represent tags that are tokens of their own; reasoning.py has the marks before these.
OPEN_MARK, CLOSE_MARK = "\ud802", "\ud803"
# Line breaks beside the closing tag that are left out with it. More of them would be searched again and again.
MAX_BREAKS = 8
# Looked up once: see outputs.py.
_TEXT, _DROPPED = PartKind.TEXT, PartKind.DROPPED
_LINE_BREAKS = "\r\n"

_Run = tuple[PartKind, str]


@dataclass(frozen=True, slots=True)
class AnswerTags:
    """start, end: the tags. ids: their ids, if they are tokens. follow_thoughts: they count behind a thought only."""

    start: str
    end: str
    ids: tuple[int, ...] = ()
    follow_thoughts: bool = True

    @classmethod
    def find(cls, tokenizer: Tokenizer, templates: Iterable[str]) -> Self | None:
        """Find a model's tags: the first known pair of which its chat template mentions both, or has another sign."""
        sources = list(templates)
        for start, end in KNOWN_ANSWER_TAGS:
            signs = [(start, end), *_OTHER_SIGNS.get(start, ())]
            if any(all(word in source for word in words) for source in sources for words in signs):
                ids = [tokenizer.id_of(tag) for tag in (start, end) if tag in tokenizer.added_tokens]
                known = tuple(one for one in ids if one is not None)
                return cls(start, end, known if len(known) == 2 else (), start in _PLAIN_WORDS)
        return None


class _Stage(IntEnum):
    """AWAITED: nothing so far. OPENED, CLOSED: only line breaks since the opening tag, or since the closing one."""

    AWAITED = 0
    OPENED = 1
    INSIDE = 2
    CLOSED = 3
    OVER = 4


class AnswerSplitter:
    """A PartSplitter for the text of an answer, which expects marks for tags that are tokens.

    is_awaited: whether tags may come, asked when the first text does. A closing tag of letters counts only at the end
    of the output, because the answer may be about tags.
    """

    def __init__(self, tags: AnswerTags, is_awaited: Callable[[], bool]) -> None:
        self._start, self._end = (OPEN_MARK, CLOSE_MARK) if tags.ids else (tags.start, tags.end)
        self.marks: Mapping[int, str] = dict(zip(tags.ids, (OPEN_MARK, CLOSE_MARK), strict=True)) if tags.ids else {}
        self._is_awaited = is_awaited
        self._stage = _Stage.AWAITED
        self._held = ""

    @property
    def is_over(self) -> bool:
        return self._stage is _Stage.OVER

    @property
    def kind(self) -> PartKind | None:
        if self._held:
            return None
        return _TEXT if self._stage in (_Stage.INSIDE, _Stage.OVER) else _DROPPED

    def feed(self, marked: str) -> Sequence[_Run]:
        if self._stage is _Stage.AWAITED and not self._held and not self._is_awaited():
            self._stage = _Stage.OVER
        if self.is_over:
            return [(_TEXT, marked)]
        self._held += marked
        runs: list[_Run] = []
        while self._held and self._advance(runs):
            pass
        return runs

    def flush(self) -> Sequence[_Run]:
        """End the output. Without the closing tag, what was held back is text."""
        runs: list[_Run] = []
        body = self._held.rstrip(_LINE_BREAKS)
        if self._stage is _Stage.INSIDE and body.endswith(self._end):
            self._take(runs, _TEXT, len(body.removesuffix(self._end).rstrip(_LINE_BREAKS)))
            self._take(runs, _DROPPED, len(self._held))
        self._take(runs, _TEXT, len(self._held))
        return runs

    def _advance(self, runs: list[_Run]) -> bool:
        """Proceed by one stage or one tag; False if that needs more text."""
        match self._stage:
            case _Stage.AWAITED:
                if self._held.startswith(self._start):
                    self._take(runs, _DROPPED, len(self._start))
                    self._stage = _Stage.OPENED
                    return True
                if self._start.startswith(self._held):
                    return False
                self._stage = _Stage.OVER
            case _Stage.OPENED | _Stage.CLOSED:
                self._take(runs, _DROPPED, len(self._held) - len(self._held.lstrip(_LINE_BREAKS)))
                if not self._held:
                    return False
                self._stage = _Stage.INSIDE if self._stage is _Stage.OPENED else _Stage.OVER
                return True
            case _Stage.INSIDE:
                return self._answer(runs)
        self._take(runs, _TEXT, len(self._held))
        return False

    def _answer(self, runs: list[_Run]) -> bool:
        place = self._held.find(self._end)
        if place < 0:
            self._take(runs, _TEXT, self._size_without_breaks(partial_match_len(self._held, (self._end,))))
            return False
        behind = place + len(self._end)
        num_behind = len(self._held) - behind
        if self.marks:
            num_text = self._size_without_breaks(num_behind + len(self._end))
            self._take(runs, _TEXT, num_text)
            self._take(runs, _DROPPED, behind - num_text)
            self._stage = _Stage.CLOSED
            return True
        if num_behind > MAX_BREAKS or self._held[behind:].strip(_LINE_BREAKS):
            self._take(runs, _TEXT, behind)
            return True
        self._take(runs, _TEXT, self._size_without_breaks(num_behind + len(self._end)))
        return False

    def _size_without_breaks(self, num_last: int) -> int:
        """Return the size of the held text without its last characters, and without the line breaks before them."""
        size = len(self._held) - num_last
        least = max(0, size - MAX_BREAKS)
        while size > least and self._held[size - 1] in _LINE_BREAKS:
            size -= 1
        return size

    def _take(self, runs: list[_Run], kind: PartKind, num_chars: int) -> None:
        if num_chars:
            runs.append((kind, self._held[:num_chars]))
            self._held = self._held[num_chars:]
