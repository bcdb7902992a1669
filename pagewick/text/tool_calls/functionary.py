"""Functionary: JSON in a tag with the tool's name in v3.1; in v3.2, parts that begin with the name of their recipient.

    all\\nI look.>>>get_weather\\n{"city": "Rome"}        text: "I look."   a call of get_weather

The prompt of v3.2 ends with the first `>>>`. The recipient `all` is the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagewick.outputs import PartKind
from pagewick.text.part_splitter import ChainedSplitter, PartSplitter, Run
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.grammar import ANSWER, GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import Reader, Reading, read_arguments
from pagewick.text.tool_calls.splitter import CallFormat, CallSplitter
from pagewick.text.tool_calls.written import WrittenCall

_OPENER, _NAME_END, _CLOSER = "<function=", ">", "</function>"
_BEGIN, _ALL = ">>>", "all\n"
_MAX_NAME = 160


def _read_tagged(reader: Reader, offer: ToolOffer) -> Reading[None]:
    reader.calls.begin((yield from reader.until((_NAME_END,), limit=_MAX_NAME)))
    yield from read_arguments(reader)
    yield from reader.blanks()
    yield from reader.word(_CLOSER, may_end=True)


def _written_tagged(calls: Sequence[WrittenCall]) -> str:
    return "".join(f"{_OPENER}{call.name}{_NAME_END}{call.arguments}{_CLOSER}" for call in calls)


def _tagged_grammar(writer: GrammarWriter) -> str:
    def of_tool(tool: Tool) -> str:
        return f"{writer.word(tool.name + _NAME_END)} {writer.arguments(tool)} {writer.word(_CLOSER)}"

    return writer.grammar(writer.calls(writer.call(of_tool), writer.word(_OPENER)), (_OPENER,))


class _TextSplitter:
    """A PartSplitter that leaves out the recipient of texts for the user. Calls are text here."""

    marks: Mapping[int, str] = {}
    is_over = False

    def __init__(self) -> None:
        self._held = ""

    @property
    def kind(self) -> PartKind | None:
        return None if self._held else PartKind.TEXT

    def feed(self, marked: str) -> Sequence[Run]:
        parts = (self._held + marked).split(_BEGIN + _ALL)
        num_held = partial_match_len(parts[-1], (_BEGIN + _ALL,))
        self._held = parts[-1][len(parts[-1]) - num_held :]
        parts[-1] = parts[-1][: len(parts[-1]) - num_held]
        runs: list[Run] = []
        for place, part in enumerate(parts):
            runs += [(PartKind.DROPPED, _BEGIN + _ALL)] * bool(place) + [(PartKind.TEXT, part)] * bool(part)
        return runs

    def flush(self) -> Sequence[Run]:
        held, self._held = self._held, ""
        return [(PartKind.TEXT, held)] if held else []


class RecipientSplitter:
    """A PartSplitter. It leaves out the recipients of texts, with or without tools."""

    marks: Mapping[int, str] = {}
    is_over = False

    def __init__(self, offer: ToolOffer | None, *, streams: bool = False) -> None:
        self._offer = offer
        self._streams = streams
        self._held = ""  # what may become the first recipient
        self._parts: PartSplitter | None = None

    @property
    def kind(self) -> PartKind | None:
        return None if self._parts is None else self._parts.kind

    def feed(self, marked: str) -> Sequence[Run]:
        if self._parts is not None:
            return self._parts.feed(marked)
        self._held += marked
        return [] if _ALL.startswith(self._held) and self._held != _ALL else self._begin()

    def flush(self) -> Sequence[Run]:
        runs = [] if self._parts is not None else [*self._begin()]
        assert self._parts is not None
        return [*runs, *self._parts.flush()]

    def _begin(self) -> Sequence[Run]:
        """Read the first recipient. A text behind it may begin like a call."""
        is_text = self._held.startswith(_ALL)
        self._parts = _TextSplitter()
        if self._offer is not None:
            form = replace(FUNCTIONARY_3_2, starts=_no_starts, exact_starts=_no_starts) if is_text else FUNCTIONARY_3_2
            self._parts = ChainedSplitter(self._parts, CallSplitter(form, self._offer, {}, streams=self._streams))
        runs: list[Run] = [(PartKind.DROPPED, _ALL)] * is_text
        return [*runs, *self._parts.feed(self._held.removeprefix(_ALL))]


def _no_starts(_: ToolOffer) -> Sequence[str]:
    return ()


def _splitter(offer: ToolOffer | None, ids: Mapping[str, int], streams: bool, begun: str) -> PartSplitter:
    return RecipientSplitter(offer, streams=streams)


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    reader.calls.begin((yield from reader.until(("\n",), limit=_MAX_NAME)))
    yield from read_arguments(reader)


def _written(calls: Sequence[WrittenCall]) -> str:
    return _BEGIN.join(f"{call.name}\n{call.arguments}" for call in calls)


def _starts(offer: ToolOffer) -> list[str]:
    return [f"{tool.name}\n" for tool in offer.tools]


def _grammar(writer: GrammarWriter) -> str:
    def of_tool(tool: Tool, before: str = "") -> str:
        return f"{writer.word(f'{before}{tool.name}{chr(10)}')} {writer.arguments(tool)}"

    if not writer.offer.tools:
        return writer.lark(f"{writer.word(_ALL)} @{ANSWER}")
    more = writer.rule(f"{writer.call(lambda tool: of_tool(tool, _BEGIN))}*" if writer.offer.is_parallel else '""')
    calls = writer.rule(f"{writer.call(of_tool)} {more}")
    if writer.offer.has_form:
        return writer.lark(f"{calls} | {writer.word(_ALL)} @{ANSWER}")
    if writer.offer.is_required:
        return writer.lark(calls)
    # Only the name of a tool makes a call of what may be a program's prompt.
    texts = [
        f"{writer.text_until(f'{_BEGIN}{tool.name}{chr(10)}')} {writer.arguments(tool)}" for tool in writer.offer.tools
    ]
    called = writer.rule(f"({' | '.join(texts)}) {more}")
    text = writer.text_without([rf"(?s:.*){_BEGIN}({writer.names})\n(?s:.*)"])
    return writer.lark(f"{calls} | {writer.word(_ALL)} ({called} | {text})?")


FUNCTIONARY_3_1 = CallFormat(
    "functionary_v31",
    read=_read_tagged,
    written=_written_tagged,
    grammar=_tagged_grammar,
    openers=(_OPENER,),
)
FUNCTIONARY_3_2 = CallFormat(
    "functionary_v32",
    read=_read,
    written=_written,
    grammar=_grammar,
    openers=(_BEGIN,),
    starts=_starts,
    exact_starts=_starts,
    own_splitter=_splitter,
)
