"""A notation for tool calls and refusals that no model uses: <call:name>{...}</call> and <no>...</no>."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pagewick.outputs import PartDelta, PartKind, ToolCall
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.part_splitter import Run, Splitting
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.offer import ToolOffer

CALL, CALL_END, NO, NO_END = "<call:", "</call>", "<no>", "</no>"
WHOLE = re.compile(r"<call:([^>]*)>(.*?)</call>|<no>(.*?)</no>", re.DOTALL)

Part = tuple[PartKind, str, str]  # kind, text, name of the tool


class FakeSplitter:
    """A PartSplitter. It holds back text that may become a tag."""

    marks: ClassVar[Mapping[int, str]] = {}
    is_over = False

    def __init__(self) -> None:
        self._held = ""
        self._awaited: tuple[str, ...] = (CALL, NO)
        self._inside = PartKind.TEXT
        self._call: ToolCall | None = None
        self._num_calls = 0

    @property
    def kind(self) -> PartKind | None:
        return None if self._inside is PartKind.TEXT and self._held else self._inside

    def feed(self, marked: str) -> Sequence[Run]:
        self._held += marked
        runs: list[Run] = []
        while self._advance(runs):
            pass
        return runs

    def flush(self) -> Sequence[Run]:
        runs: list[Run] = []
        self._say(runs, len(self._held))
        return runs

    def _advance(self, runs: list[Run]) -> bool:
        places = {self._held.find(tag): tag for tag in self._awaited if tag in self._held}
        place = min(places, default=len(self._held) - partial_match_len(self._held, self._awaited))
        is_name = self._awaited == (">",)
        if not is_name:
            self._say(runs, place)
            place = 0
        elif not places:
            return False
        if not places:
            return False
        tag = places[min(places)]
        name = self._held[:place]
        runs.append((PartKind.DROPPED, self._held[: place + len(tag)]))
        self._held = self._held[place + len(tag) :]
        if tag == CALL:
            self._inside, self._awaited = PartKind.TOOL_CALL, (">",)
        elif tag == ">":
            self._call, self._awaited = ToolCall(self._num_calls, f"call_{self._num_calls}", name), (CALL_END,)
            self._num_calls += 1
            runs.append(PartDelta(PartKind.TOOL_CALL, "", self._call))
        elif tag == NO:
            self._inside, self._awaited = PartKind.REFUSAL, (NO_END,)
        else:
            self._inside, self._awaited, self._call = PartKind.TEXT, (CALL, NO), None
        return True

    def _say(self, runs: list[Run], num_chars: int) -> None:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        if not text:
            return
        if self._inside is PartKind.TOOL_CALL:
            runs.append((PartKind.DROPPED, text))
            if self._call is not None:
                runs.append(PartDelta(PartKind.TOOL_CALL, text, self._call))
        else:
            runs.append((self._inside, text))


class FakeSplitting:
    def splitter(self) -> FakeSplitter:
        return FakeSplitter()


class FakeFormat:
    """A PartFormat. num_tools: the number of tools offered with the latest prompt."""

    kinds = frozenset({PartKind.TOOL_CALL, PartKind.REFUSAL})
    json_spacing = None

    def __init__(self) -> None:
        self.num_tools = 0

    def splitting(
        self, prompt_token_ids: Sequence[int], offer: ToolOffer | None, *, is_guided: bool = False
    ) -> Splitting | None:
        self.num_tools = 0 if offer is None else len(offer.tools)
        return FakeSplitting()

    def grammar(self, offer: ToolOffer, limits: GrammarLimits) -> str | None:
        return None

    def form_grammar(self, limits: GrammarLimits) -> str | None:
        return None

    def beginnings(self, offer: ToolOffer) -> Sequence[str]:
        return ()


def parts_of(text: str) -> list[Part]:
    """Return the parts of a whole text whose tags are all closed, by definition of the notation."""
    parts: list[Part] = []
    end = 0
    for match in WHOLE.finditer(text):
        parts.append((PartKind.TEXT, text[end : match.start()], ""))
        name, arguments, refusal = match.groups()
        parts.append((PartKind.REFUSAL, refusal, "") if name is None else (PartKind.TOOL_CALL, arguments, name))
        end = match.end()
    parts.append((PartKind.TEXT, text[end:], ""))
    return [part for part in parts if part[1] or part[0] is PartKind.TOOL_CALL]
