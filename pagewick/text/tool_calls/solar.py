"""Solar Open: messages whose first token says what they are: a thought, a text, or calls.

    <|think|>It is a sum.<|end|><|begin|>assistant<|content|>Four.<|flush|>

A call has an id, the tool's name and JSON, each behind a token of its own. The prompt ends with the first header.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from pagewick.outputs import PartKind
from pagewick.text.part_splitter import ChainedSplitter, PartSplitter, Run
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.grammar import ANSWER, GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import NoCall, Reader, Reading, read_arguments
from pagewick.text.tool_calls.splitter import CallFormat, CallSplitter, marks_of
from pagewick.text.tool_calls.written import WrittenCall

_THINK, _CONTENT, _CALLS = "<|think|>", "<|content|>", "<|tool_calls|>"
_BEGIN, _END, _FLUSH, _CALLS_END = "<|begin|>", "<|end|>", "<|flush|>", "<|calls|>"
_CALL, _NAME, _ARGUMENTS, _CALL_END = (f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end"))
_KINDS = {_CALLS: PartKind.TEXT, _CONTENT: PartKind.TEXT, _THINK: PartKind.REASONING}
_MESSAGE_WORDS = (*_KINDS, _BEGIN, _END, _FLUSH, _CALLS_END)
_WORDS = (*_MESSAGE_WORDS, _CALL, _NAME, _ARGUMENTS, _CALL_END)
_ROLE = "assistant"
# A longer text without a word is no header. It would be searched again and again.
_MAX_HEADER = 40
_ID = re.compile(r"[a-z0-9]{10}")


class MessageSplitter:
    """A PartSplitter for messages. It leaves out headers; calls, with the token before them, are text here."""

    is_over = False

    def __init__(self, ids: Mapping[str, int]) -> None:
        marks = marks_of(_WORDS, ids)
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
            self._say(runs, self._held[: word.start()], is_whole=True)
            name = self._words[word[0]]
            runs.append((PartKind.TEXT if name == _CALLS else PartKind.DROPPED, word[0]))
            self._kind = _KINDS.get(name)
            self._held = self._held[word.end() :]
        safe = len(self._held) - partial_match_len(self._held, [*self._words])
        if self._kind is not None or safe > _MAX_HEADER or not _ROLE.startswith(self._held[:safe].strip()):
            self._say(runs, self._held[:safe])
            self._held = self._held[safe:]
        return runs

    def flush(self) -> Sequence[Run]:
        runs: list[Run] = []
        self._say(runs, self._held)
        self._held = ""
        return runs

    def _say(self, runs: list[Run], text: str, *, is_whole: bool = False) -> None:
        """Emit text of a message, or before one. is_whole: a word follows, so that it may be a header."""
        if not text:
            return
        if self._kind is None and is_whole and len(text) <= _MAX_HEADER and text.strip() in ("", _ROLE):
            runs.append((PartKind.DROPPED, text))
            return
        self._kind = self._kind or PartKind.TEXT
        runs.append((self._kind, text))


def _splitter(offer: ToolOffer | None, ids: Mapping[str, int], streams: bool, begun: str) -> PartSplitter:
    messages = MessageSplitter(ids)
    if offer is None:
        return messages
    return ChainedSplitter(messages, CallSplitter(SOLAR_OPEN, offer, ids, streams=streams))


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from reader.blanks()
    while True:
        yield from reader.word(_CALL)
        call_id = yield from reader.until([_NAME], limit=80)
        if not re.fullmatch(r"[\w-]*", call_id.strip()):
            raise NoCall
        reader.calls.begin((yield from reader.until([_ARGUMENTS], limit=160)).strip())
        yield from read_arguments(reader)
        yield from reader.blanks()
        yield from reader.word(_CALL_END, may_end=True)
        reader.calls.commit()
        if (yield from reader.blanks()) != reader.spell(_CALL)[0]:
            return


def _written(calls: Sequence[WrittenCall]) -> str:
    written = [
        f"{_CALL}{place:010}{_NAME}{call.name}{_ARGUMENTS}{call.arguments}{_CALL_END}"
        for place, call in enumerate(calls)
    ]
    return f"{_CALLS}{''.join(written)}"


def _grammar(writer: GrammarWriter) -> str:
    def of_tool(tool: Tool) -> str:
        return f"{writer.words(tool.name, _ARGUMENTS)} {writer.arguments(tool)} {writer.word(_CALL_END)}"

    text = "/(?s:.*)/"
    between, content = writer.words(_END, _BEGIN, _ROLE), writer.word(_CONTENT)
    thought = writer.rule(f"{writer.word(_THINK)} {text} {between}")
    if not writer.offer.tools:
        return writer.lark(f"{thought}? {content} @{ANSWER}")
    call = writer.rule(f"{writer.word(_CALL)} /{_ID.pattern}/ {writer.word(_NAME)} {writer.call(of_tool)}")
    calls = writer.rule(f"{writer.word(_CALLS)} {writer.calls(call, '')}")
    if writer.offer.has_form:
        return writer.lark(f"{thought}? {calls} | {thought}? {content} @{ANSWER}")
    preamble = writer.rule(f"{content} {text} {between}")
    answer = f"{thought}? {preamble}? {calls}"
    return writer.lark(answer if writer.offer.is_required else f"{answer} | {thought}? {content} {text}")


def ten_characters(call_id: str, name: str, place: int) -> str:
    """Return an id as the model writes it: the client's if it has this form, and otherwise always the same one."""
    return call_id if _ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:10]


SOLAR_OPEN = CallFormat(
    "solar_open",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=_WORDS,
    openers=(_CALLS,),
    prompt_id=ten_characters,
    own_splitter=_splitter,
)
