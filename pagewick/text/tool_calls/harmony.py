"""Harmony, the format of gpt-oss: messages in channels; one has the thoughts, and calls are addressed to tools.

A message is a header, `<|message|>`, a body and an end. The header of a call names its recipient: `to=functions.f`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence

from pagewick.outputs import PartDelta, PartKind, ToolCall
from pagewick.text.part_splitter import Run
from pagewick.text.tool_calls.grammar import ANSWER, GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import NoCall, Reader, Reading, as_object
from pagewick.text.tool_calls.splitter import CallFormat, marks_of
from pagewick.text.tool_calls.written import WrittenCall

_CHANNEL, _MESSAGE, _CONSTRAIN, _START = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_WORDS = (_CHANNEL, _MESSAGE, _CONSTRAIN, _START, _END, _CALL, _RETURN)
# A header may begin with a role and a recipient, before its first mark.
_LEAD = re.compile(r"\s*(assistant)?\s*(to=[\w.-]+)?\s*")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonySplitter:
    """A PartSplitter. It also separates the thoughts, and leaves out headers, with or without tools."""

    is_over = False

    def __init__(self, offer: ToolOffer | None, ids: Mapping[str, int], *, streams: bool = False) -> None:
        marks = marks_of(_WORDS, ids)
        self.marks = {ids[word]: mark for word, mark in marks.items()}
        self._mark = {word: marks.get(word, word) for word in _WORDS}
        self._ends = re.compile("|".join(re.escape(self._mark[word]) for word in (_END, _CALL, _RETURN, _START)))
        self._any = re.compile("|".join(re.escape(mark) for mark in self._mark.values()))
        self._offer = offer or ToolOffer()
        self._streams = streams
        self._held = ""  # a header, or the body of a call that may not be one
        self._kind: PartKind | None = None  # the body's; None within a header
        self._call: ToolCall | None = None
        self._num_calls = 0

    @property
    def kind(self) -> PartKind | None:
        return self._kind

    def feed(self, marked: str) -> Sequence[Run]:
        runs: list[Run] = []
        self._held += marked
        while self._read_body(runs) if self._kind is not None else self._read_header(runs):
            pass
        return runs

    def flush(self) -> Sequence[Run]:
        runs: list[Run] = []
        if self._kind is None:
            self._drop_header(runs, self._held)
        else:
            self._say(runs, self._held)
        self._held = ""
        return [run for run in runs if isinstance(run, PartDelta) or run[1]]

    def _read_header(self, runs: list[Run]) -> bool:
        header, mark, rest = self._held.partition(self._mark[_MESSAGE])
        if not mark:
            return False
        self._drop_header(runs, header + mark)
        self._held = rest
        recipient = _RECIPIENT.search(header)
        may_call = self._offer.is_parallel or not self._num_calls
        if recipient is not None and recipient[1] in self._offer.by_name and may_call:
            self._kind = PartKind.TOOL_CALL
            self._call = ToolCall(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", recipient[1])
            if self._streams:
                self._begin(runs)
        else:
            is_thought = f"{self._mark[_CHANNEL]}analysis" in header
            self._kind = PartKind.REASONING if is_thought else PartKind.TEXT
        return True

    def _drop_header(self, runs: list[Run], header: str) -> None:
        """Leave out a header. Text before its first mark stays, unless it is a role and a recipient."""
        first = self._any.search(header)
        lead = header[: first.start()] if first else header
        is_header = first is not None and _LEAD.fullmatch(lead)
        num_shown = 0 if is_header else len(lead)
        both = (PartKind.TEXT, header[:num_shown]), (PartKind.DROPPED, header[num_shown:])
        runs += [run for run in both if run[1]]

    def _read_body(self, runs: list[Run]) -> bool:
        end = self._ends.search(self._held)
        if end is None:
            if self._call is None or self._streams:
                self._say(runs, self._held)
                self._held = ""
            return False
        body, self._held = self._held[: end.start()], self._held[end.end() :]
        self._say(runs, body)
        runs.append((PartKind.DROPPED, end[0]))
        self._kind = self._call = None
        return True

    def _say(self, runs: list[Run], body: str) -> None:
        if self._call is None or self._kind is None:
            if body:
                runs.append((self._kind or PartKind.TEXT, body))
            return
        arguments = body
        if not self._streams:
            try:
                arguments = as_object(body)
            except NoCall:
                runs.append((PartKind.TEXT, body))
                return
            self._begin(runs)
        runs += [(PartKind.DROPPED, body), PartDelta(PartKind.TOOL_CALL, arguments, self._call)]

    def _begin(self, runs: list[Run]) -> None:
        self._num_calls += 1
        runs.append(PartDelta(PartKind.TOOL_CALL, "", self._call))


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    """Read nothing: HarmonySplitter reads this format."""
    yield
    raise NoCall


def _written(calls: Sequence[WrittenCall]) -> str:
    return f"{_END}{_START}assistant".join(
        f"{_CHANNEL}commentary to=functions.{call.name} {_CONSTRAIN}json{_MESSAGE}{call.arguments}" for call in calls
    )


def _grammar(writer: GrammarWriter) -> str:
    def message(*header: str) -> str:
        return writer.words(_CHANNEL, *header, _MESSAGE)

    def of_tool(tool: Tool) -> str:
        header = message(f"commentary to=functions.{tool.name} ", _CONSTRAIN, "json")
        return f"{header} {writer.arguments(tool)}"

    text = "/(?s:.*)/"
    between = writer.words(_END, _START, "assistant")
    thoughts = writer.rule(f"{message('analysis')} {text} {between}")
    final = message("final")
    if not writer.offer.tools:
        return writer.lark(f"{thoughts}* {final} @{ANSWER}")
    call = writer.call(of_tool)
    if writer.offer.has_form:
        return writer.lark(f"{thoughts}* {call} | {thoughts}* {final} @{ANSWER}")
    preamble = writer.rule(f"{message('commentary')} {text} {between}")
    answer = f"{thoughts}* {preamble}* {call}"
    return writer.lark(answer if writer.offer.is_required else f"{answer} | {thoughts}* {final} {text}")


HARMONY = CallFormat(
    "openai",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=_WORDS,
    own_splitter=lambda offer, ids, streams, begun: HarmonySplitter(offer, ids, streams=streams),
)
