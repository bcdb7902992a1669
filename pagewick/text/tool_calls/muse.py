"""Muse Glimmer: messages to recipients: the model itself, whose are the thoughts, the user, or a tool.

     to=self<|message|>It is a sum.<|eom|><|start|>assistant to=user<|message|>Four.<|eot|>

A message to a tool has a call in tags. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagewick.outputs import PartKind
from pagewick.text.part_splitter import ChainedSplitter, PartSplitter, Run
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.grammar import ANSWER, GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.splitter import CallFormat, CallSplitter, marks_of
from pagewick.text.tool_calls.tagged import TaggedCalls
from pagewick.text.tool_calls.written import WrittenCall

_START, _MESSAGE, _MORE, _END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_MESSAGE_WORDS = (_START, _MESSAGE, _MORE, _END)
_ROLE, _TO, _SELF = "assistant", " to=", "self"
# A longer text is no header. It would be read again and again.
_MAX_HEADER = 160
_HEADER = re.compile(rf"\s*({_ROLE})?\s*(to=([\w.-]+))?\s*")
_BEGUN_HEADER = re.compile(rf"\s*({_ROLE})?\s*(to=[\w.-]*)?\s*")
_CALLS = TaggedCalls(
    opener="<atem:function_calls>",
    closer="</atem:function_calls>",
    call_open='<atem:invoke name="',
    name_end='">',
    key_open='<atem:parameter name="',
    key_end=('">',),
    value_end="</atem:parameter>",
    call_close="</atem:invoke>",
    is_section=True,
)


class RecipientMessages:
    """A PartSplitter for messages. It leaves out headers and ends; calls are text here."""

    is_over = False

    def __init__(self, ids: Mapping[str, int]) -> None:
        marks = marks_of(MUSE_GLIMMER.words, ids)
        self.marks = {ids[word]: mark for word, mark in marks.items()}
        self._words = {marks.get(word, word): word for word in _MESSAGE_WORDS}
        self._any = re.compile("|".join(map(re.escape, self._words)))
        self._held = ""  # a header, or letters that may become a word
        self._kind: PartKind | None = None  # the message's; None within a header

    @property
    def kind(self) -> PartKind | None:
        return self._kind

    def feed(self, marked: str) -> Sequence[Run]:
        runs: list[Run] = []
        self._held += marked
        while (word := self._any.search(self._held)) is not None:
            before, self._held = self._held[: word.start()], self._held[word.end() :]
            header = _HEADER.fullmatch(before) if self._kind is None and len(before) <= _MAX_HEADER else None
            if before:
                runs.append((PartKind.DROPPED if header is not None else self._kind or PartKind.TEXT, before))
            runs.append((PartKind.DROPPED, word[0]))
            is_thought = header is not None and header[3] == _SELF
            body = PartKind.REASONING if is_thought else PartKind.TEXT
            self._kind = body if self._words[word[0]] == _MESSAGE else None
        safe = len(self._held) - partial_match_len(self._held, [*self._words])
        if safe and (self._kind is not None or not _may_be_header(self._held[:safe])):
            self._kind = self._kind or PartKind.TEXT
            runs.append((self._kind, self._held[:safe]))
            self._held = self._held[safe:]
        return runs

    def flush(self) -> Sequence[Run]:
        held, self._held = self._held, ""
        return [(self._kind or PartKind.TEXT, held)] if held else []


def _may_be_header(text: str) -> bool:
    if len(text) > _MAX_HEADER:
        return False
    word = text.split()[-1] if text.strip() else ""
    begun = text.rstrip()[: -len(word)] if word and any(one.startswith(word) for one in (_ROLE, "to=")) else text
    return _BEGUN_HEADER.fullmatch(begun) is not None


def _splitter(offer: ToolOffer | None, ids: Mapping[str, int], streams: bool, begun: str) -> PartSplitter:
    messages = RecipientMessages(ids)
    if offer is None:
        return messages
    return ChainedSplitter(messages, CallSplitter(MUSE_GLIMMER, offer, ids, streams=streams))


def _written(calls: Sequence[WrittenCall]) -> str:
    """Write calls behind the first `<|start|>assistant`."""
    bodies = [f"{_TO}{call.name}{_MESSAGE}{_CALLS.written([call])}" for call in calls]
    return f"{_MORE}{_START}{_ROLE}".join(bodies)


def _grammar(writer: GrammarWriter) -> str:
    def of_tool(tool: Tool) -> str:
        header = writer.words(f"{_TO}{tool.name}", _MESSAGE, _CALLS.opener, "\n")
        return f"{header} {_CALLS.call_grammar(writer, tool)} {writer.words(chr(10), _CALLS.closer)}"

    text = "/(?s:.*)/"
    between = writer.words(_MORE, _START, _ROLE)
    thoughts = writer.rule(f"({writer.words(_TO + _SELF, _MESSAGE)} {text} {between})*")
    to_user = writer.words(f"{_TO}user", _MESSAGE)
    if not writer.offer.tools:
        return writer.lark(f"{thoughts} {to_user} @{ANSWER}")
    calls = writer.rule(writer.calls(writer.call(of_tool), between))
    if writer.offer.has_form:
        return writer.lark(f"{thoughts} ({calls} | {to_user} @{ANSWER})")
    if writer.offer.is_required:
        return writer.lark(f"{thoughts} {calls}")
    return writer.lark(f"{thoughts} ({to_user} {text} {between})? {calls} | {thoughts} {to_user} {text}")


_FORMAT = _CALLS.format("muse_glimmer")
MUSE_GLIMMER: CallFormat = replace(
    _FORMAT, words=(*_MESSAGE_WORDS, *_FORMAT.words), written=_written, grammar=_grammar, own_splitter=_splitter
)
