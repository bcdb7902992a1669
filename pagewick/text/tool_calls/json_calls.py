"""Calls that are JSON objects with a name and arguments: a marker, one object or a list of them, a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.reading import Reader, Reading, read_envelopes
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, envelope


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """opener, closer: the markers. pad: white space after the opener and before the closer.

    header: words behind the opener, in place of `pad` there; some may be markers, others white space. other_openers:
    markers that some models of the family write in place of `opener`. An opener may end with the bracket of the list,
    since its word alone could be text; no closer follows then. is_list: the calls are a list between one pair of
    markers; otherwise each call has its own pair, and `separator` is between them. name_key, arguments_key: how the
    model names the two fields. is_single: a response has one call.
    """

    opener: str
    closer: str = ""
    pad: str = ""
    header: tuple[str, ...] = ()
    separator: str = "\n"
    other_openers: tuple[str, ...] = ()
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_single: bool = False

    @property
    def _opening(self) -> tuple[str, ...]:
        return self.header or (self.pad,) * bool(self.pad)

    def read(self, reader: Reader, offer: ToolOffer) -> Reading[None]:
        for word in filter(str.strip, self.header):
            yield from reader.blanks()
            yield from reader.word(word)
        if reader.opener.endswith("["):
            reader.ahead = "["
        arguments = dict.fromkeys((self.arguments_key, "arguments", "parameters"))
        yield from read_envelopes(reader, name=self.name_key, arguments=(*arguments,))
        if self.closer and (yield from reader.blanks()) == reader.spell(self.closer)[0]:
            yield from reader.word(self.closer, may_end=True)

    def written(self, calls: Sequence[WrittenCall]) -> str:
        bodies = [envelope(call, self.name_key, self.arguments_key) for call in calls]
        if self.is_list:
            bodies = [f"[{', '.join(bodies)}]"]
        opening = "".join((self.opener.removesuffix("["), *self._opening))
        return self.separator.join(f"{opening}{body}{self.pad}{self.closer}" for body in bodies)

    def grammar(self, writer: GrammarWriter) -> str:
        def of_tool(tool: Tool) -> str:
            return writer.envelope(tool, name=self.name_key, arguments=self.arguments_key)

        call = writer.call(of_tool)
        opening, ending = self._opening, [one for one in (self.pad, self.closer) if one]
        openers, opened = (self.opener, *self.other_openers), {}
        if self.is_list:
            calls = writer.calls(call, writer.word(", "))
            body = f"{writer.words(*opening, '[')} {calls} {writer.words(']', *ending)}"
            opened = {one: f'{calls} "]"' for one in openers if one.endswith("[")}
        else:
            whole = writer.rule(f"{writer.words(*opening)} {call} {writer.words(*ending)}")
            body = (
                whole
                if self.is_single
                else writer.calls(whole, writer.words(*[self.separator] * bool(self.separator), self.opener))
            )
        return writer.grammar(body, openers, opened=opened)

    def format(self, name: str) -> CallFormat:
        openers = (self.opener, *self.other_openers)
        return CallFormat(
            name,
            read=self.read,
            written=self.written,
            grammar=self.grammar,
            words=tuple(one for one in (*openers, *self.header, self.closer) if one.strip() and one[-1] != "["),
            openers=openers,
        )
