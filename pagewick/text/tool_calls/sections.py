"""Calls that are a name and JSON between tokens, all in one section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import END, Reader, Reading, read_arguments
from pagewick.text.tool_calls.splitter import CallFormat, PromptId, same_id
from pagewick.text.tool_calls.written import WrittenCall


@dataclass(frozen=True, slots=True)
class SectionCalls:
    """A section is opener, calls, closer; a call is call_open, kind, head, name_end, gap, arguments, pad, call_close.

    kind: a word and a marker, or nothing. head: prefix and name, with the call's number if is_numbered. separator:
    between calls.
    """

    opener: str
    closer: str
    call_open: str
    name_end: str
    call_close: str
    kind: tuple[str, str] = ("", "")
    gap: str = ""
    pad: str = ""
    separator: str = ""
    prefix: str = ""
    is_numbered: bool = False

    def read(self, reader: Reader, offer: ToolOffer) -> Reading[None]:
        yield from reader.blanks()
        while (yield from reader.one_of((self.call_open, self.closer))) == self.call_open:
            if self.kind[1]:
                yield from reader.until(self.kind[1:], limit=40)
            head = (yield from reader.until([self.name_end], limit=200)).strip()
            reader.calls.begin(self._name_of(head))
            yield from read_arguments(reader)
            yield from reader.blanks()
            if self.pad:
                yield from reader.word(self.pad.strip(), may_end=True)
                yield from reader.blanks()
            yield from reader.word(self.call_close, may_end=True)
            reader.calls.commit()
            if (yield from reader.blanks()) == END:
                return

    def _name_of(self, head: str) -> str:
        name = head.removeprefix(self.prefix)
        return name.rpartition(":")[0] or name if self.is_numbered else name

    def written(self, calls: Sequence[WrittenCall]) -> str:
        bodies = [
            f"{self.call_open}{''.join(self.kind)}{self.prefix}{call.name}{f':{index}' * self.is_numbered}"
            f"{self.name_end}{self.gap}{call.arguments}{self.pad}{self.call_close}"
            for index, call in enumerate(calls)
        ]
        return f"{self.opener}{self.separator.join(bodies)}{self.closer}"

    def grammar(self, writer: GrammarWriter) -> str:
        def of_tool(tool: Tool) -> str:
            opening = writer.words(*filter(None, (self.call_open, *self.kind, self.prefix + tool.name)))
            number = '":" /[0-9]{1,4}/' if self.is_numbered else ""
            name_end = writer.words(*filter(None, (self.name_end, self.gap)))
            ending = writer.words(*filter(None, (self.pad, self.call_close)))
            return f"{opening} {number} {name_end} {writer.arguments(tool)} {ending}"

        between = writer.word(self.separator) if self.separator else ""
        calls = writer.calls(writer.call(of_tool), between)
        return writer.grammar(f"{calls} {writer.word(self.closer)}", (self.opener,))

    def format(self, name: str, prompt_id: PromptId = same_id) -> CallFormat:
        words = (self.opener, self.closer, self.call_open, self.kind[1], self.name_end, self.call_close)
        return CallFormat(
            name,
            read=self.read,
            written=self.written,
            grammar=self.grammar,
            words=tuple(word for word in words if word.startswith("<")),
            openers=(self.opener,),
            prompt_id=prompt_id,
        )
