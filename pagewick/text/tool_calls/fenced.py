"""Calls in Python's notation, one a line, between markers on lines of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.python_calls import python_call, read_python_call, written_python
from pagewick.text.tool_calls.reading import Reader, Reading
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall


@dataclass(frozen=True, slots=True)
class FencedCalls:
    """opener, closer: the markers. A call may be within `print()`."""

    opener: str
    closer: str

    def read(self, reader: Reader, offer: ToolOffer) -> Reading[None]:
        while (yield from reader.blanks()) != reader.spell(self.closer)[0]:
            yield from read_python_call(reader, offer, may_print=True)
            reader.calls.commit()
        yield from reader.word(self.closer, may_end=True)

    def written(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join([self.opener, *map(written_python, calls), self.closer])

    def grammar(self, writer: GrammarWriter) -> str:
        calls = writer.calls(writer.call(partial(python_call, writer)), writer.word("\n"))
        return writer.grammar(f"{writer.word(chr(10))} {calls} {writer.words(chr(10), self.closer)}", (self.opener,))

    def format(self, name: str) -> CallFormat:
        return CallFormat(
            name,
            read=self.read,
            written=self.written,
            grammar=self.grammar,
            words=tuple(word for word in (self.opener, self.closer) if word.startswith("<")),
            openers=(self.opener,),
        )
