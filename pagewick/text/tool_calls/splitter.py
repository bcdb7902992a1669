"""CallSplitter: the machine that separates tool calls from text, for every format."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewick.outputs import PartDelta, PartKind, ToolCall, join_parts
from pagewick.text.part_splitter import PartSplitter, Run
from pagewick.text.stop_strings import partial_match_len
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.reading import BLANKS, END, NoCall, Reader, Reading
from pagewick.text.tool_calls.written import WrittenCall

PromptId = Callable[[str, str, int], str]

# Looked up once: see outputs.py.
_TEXT, _TOOL_CALL, _DROPPED = PartKind.TEXT, PartKind.TOOL_CALL, PartKind.DROPPED
# Marks are lone surrogates from here on; reasoning.py has those before.
_FIRST_MARK = 0xD810


def same_id(call_id: str, name: str, place: int) -> str:
    """Return an id as it is, for prompts of most models."""
    return call_id


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    words: the markers, each of which may be a token of its own. openers: those that begin calls in the midst of a text.
    starts: texts that begin calls at the beginning of a response, where no marker is needed. exact_starts: those with
    which the grammar lets them begin.
    json_spacing: llguidance's options for the white space of forms that are JSON, if calls are JSON without a marker.
    read: reads calls from the end of the opener on, or from the start. written: writes calls as the family does, for
    prompts. grammar: a Lark rule for the calls with their opener. prompt_id: makes the id
    that the chat template accepts from the client's, the call's name and its place in the conversation.
    has_result_role: whether the family knows the role of results although its templates do not name it.
    own_splitter: makes, from offer, ids, streams and the prompt's end, the splitter of a family that marks all parts
    of a response.
    """

    name: str
    read: Callable[[Reader, ToolOffer], Reading[None]]
    written: Callable[[Sequence[WrittenCall]], str]
    grammar: Callable[[GrammarWriter], str]
    words: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    starts: Callable[[ToolOffer], Sequence[str]] = lambda _: ()
    exact_starts: Callable[[ToolOffer], Sequence[str]] = lambda _: ()
    json_spacing: Mapping[str, Any] | None = None
    prompt_id: PromptId = same_id
    has_result_role: bool = False
    own_splitter: Callable[[ToolOffer | None, Mapping[str, int], bool, str], PartSplitter] | None = None


def marks_of(words: Sequence[str], ids: Mapping[str, int]) -> dict[str, str]:
    """Return the mark of each word that is a token."""
    return {word: chr(_FIRST_MARK + place) for place, word in enumerate(words) if word in ids}


class CallSplitter:
    """A PartSplitter for one choice.

    ids: the words that are tokens, with their ids. streams: emit arguments as they come; otherwise a call is emitted
    when it is complete, so that one that breaks off can still become text.
    White space before and after calls is dropped.
    """

    def __init__(self, form: CallFormat, offer: ToolOffer, ids: Mapping[str, int], *, streams: bool = False) -> None:
        marks = marks_of(form.words, ids)
        self.marks = {ids[word]: mark for word, mark in marks.items()}
        self._spelling = marks
        self._form = form
        self._offer = offer
        self._streams = streams
        self._openers = [self._spell(word) for word in form.openers]
        self._starts = [self._spell(word) for word in (form.exact_starts if offer.has_form else form.starts)(offer)]
        # With a form, a text that does not begin with calls has none.
        self._is_undecided = offer.has_form or bool(self._starts)
        self._blanks: list[str] = []  # white space that may be followed by a call
        self._held = ""  # text that may become an opener or a start
        self._is_after_call = False
        self._reading: Reading[None] | None = None
        self._reader: Reader | None = None
        self._raw: list[str] = []  # characters that were read but not emitted
        self._parts: list[PartDelta] = []  # the parts that were made from them
        self._call: ToolCall | None = None
        self._num_calls = 0
        self._is_committed = False

    def _spell(self, word: str) -> str:
        return self._spelling.get(word, word)

    @property
    def kind(self) -> PartKind | None:
        is_behind_call = self._is_after_call and not (self._held or self._blanks)
        if self._reading is not None or is_behind_call:
            return _TOOL_CALL
        return None if self._held or self._blanks or self._is_undecided else _TEXT

    @property
    def is_over(self) -> bool:
        return self._reading is None and not (self._openers or self._is_undecided or self._held or self._blanks)

    def feed(self, marked: str) -> Sequence[Run]:
        runs: list[Run] = []
        rest = marked
        while rest:
            rest = self._read_text(runs, rest) if self._reading is None else self._read_calls(runs, rest)
        if self._streams and self._call is not None:
            self._emit(runs)
        return runs

    def flush(self) -> Sequence[Run]:
        runs: list[Run] = []
        if self._reading is not None:
            self._step(runs, END)
            if self._reading is not None:
                self._fail(runs)
        if not self._is_after_call:
            self._held = "".join(self._blanks) + self._held
        elif self._blanks:
            runs.append((_DROPPED, "".join(self._blanks)))
        self._blanks.clear()
        if self._held:
            runs.append((_TEXT, self._held))
            self._held = ""
        return runs

    # The methods of Calls.

    def begin(self, name: str) -> None:
        if name not in self._offer.by_name or (self._num_calls and not self._offer.is_parallel):
            raise NoCall
        self._call = ToolCall(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", name)
        self._num_calls += 1
        self._parts.append(PartDelta(_TOOL_CALL, "", self._call))

    def write(self, arguments: str) -> None:
        if arguments:
            self._parts.append(PartDelta(_TOOL_CALL, arguments, self._call))

    def commit(self) -> None:
        self._is_committed = True

    # Text.

    def _read_text(self, runs: list[Run], more: str) -> str:
        """Emit text up to a call; return what is left to read."""
        text = self._held + more
        self._held = ""
        if self._is_undecided:
            body = text if self._offer.has_form else text.lstrip(BLANKS)
            self._hold_blanks(text[: len(text) - len(body)])
            openers = tuple(self._openers) if self._offer.has_form else ()
            if any(start.startswith(body) for start in (*self._starts, *openers)):
                self._held = body
                return ""
            self._is_undecided = False
            if body.startswith(tuple(self._starts)):
                return self._open(runs, body, "")
            if self._offer.has_form and not body.startswith(openers):
                self._openers = []
            text = body
        places = {place: opener for opener in self._openers if (place := text.find(opener)) >= 0}
        place = min(places, default=len(text) - self._num_partial(text))
        self._say(runs, text[:place])
        if not places:
            self._held = text[place:]
            return ""
        opener = places[place]
        return self._open(runs, text[place + len(opener) :], opener)

    def _num_partial(self, text: str) -> int:
        return partial_match_len(text, self._openers) if self._openers else 0

    def _say(self, runs: list[Run], text: str) -> None:
        """Emit text, but hold back the white space at its end."""
        body = text.rstrip(BLANKS) if self._openers or self._is_after_call else text
        if body:
            self._drop_or_say(runs, _TEXT)
            runs.append((_TEXT, body))
            self._is_after_call = False
        self._hold_blanks(text[len(body) :])

    def _hold_blanks(self, blanks: str) -> None:
        if blanks:
            self._blanks.append(blanks)

    def _drop_or_say(self, runs: list[Run], kind: PartKind) -> None:
        if self._blanks:
            runs.append((kind, "".join(self._blanks)))
            self._blanks.clear()

    # Calls.

    def _open(self, runs: list[Run], rest: str, opener: str) -> str:
        self._raw = [*self._blanks, opener]
        self._blanks = []
        self._reader = Reader(self, self._spell, opener)
        self._reading = self._form.read(self._reader, self._offer)
        self._step(runs, None)
        return rest

    def _read_calls(self, runs: list[Run], text: str) -> str:
        """Read characters of calls; return what is left to read."""
        for place, char in enumerate(text):
            self._raw.append(char)
            given_back = self._step(runs, char)
            if self._reading is None:
                return given_back + text[place + 1 :]
        return ""

    def _step(self, runs: list[Run], char: str | None) -> str:
        """Give the reader a character. Return the character if calls ended before it."""
        reading, reader = self._reading, self._reader
        assert reading is not None and reader is not None
        self._is_committed = False
        try:
            next(reading) if char is None else reading.send(char)
        except NoCall:
            return self._fail(runs, char or "")
        except StopIteration:
            ahead = reader.ahead or ""
            if self._call is None:  # markers without a call between them
                return self._fail(runs, ahead)
            if ahead:
                self._raw.pop()
            self._emit(runs)
            self._reading, self._call = None, None
            self._is_after_call = True
            return ahead
        if self._is_committed:
            self._emit(runs)
            self._is_after_call = True
        return ""

    def _emit(self, runs: list[Run]) -> None:
        """Emit what was read, and the calls that were made from it."""
        if raw := "".join(self._raw):
            runs.append((_DROPPED, raw))
        joined: list[PartDelta] = []
        join_parts(joined, self._parts)
        runs += joined
        self._raw, self._parts = [], []

    def _fail(self, runs: list[Run], char: str = "") -> str:
        """Declare what was read to be text. Return the last character, which is read again."""
        if char:
            self._raw.pop()
        if self._streams and self._call is not None:
            self._emit(runs)
        self._num_calls -= len({part.call.index for part in self._parts if part.call is not None})
        self._reading, self._call, self._parts = None, None, []
        text = "".join(self._raw)
        self._raw = []
        if self._is_after_call and not text.strip(BLANKS):
            self._hold_blanks(text)
        elif text:
            runs.append((_TEXT, text))
            self._is_after_call = False
        return char
