"""Calls that have tags around each argument, whose values have no quotes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagewick.text.tool_calls.alternatives import strings_and_others
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.plain_values import json_of
from pagewick.text.tool_calls.reading import END, Reader, Reading, escaped
from pagewick.text.tool_calls.schema_types import types_of
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall, as_text

_MAX_NAME = 160
_MAX_KEY = 1000
_STRINGS = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """A call is call_open, name, name_end, arguments, call_close; an argument key_open, key, key_end, value, value_end.

    opener, closer: around each call, or around all of them if is_section. call_close may be the closer. key_end:
    several markers may have white space between them. kinds: two markers in place of key_end, before strings
    and before other values. pad: line break around a value. line: white space between the parts.
    """

    opener: str
    closer: str
    call_open: str
    name_end: str
    key_open: str
    key_end: tuple[str, ...]
    value_end: str
    call_close: str
    pad: str = ""
    line: str = "\n"
    is_section: bool = False
    kinds: tuple[str, ...] = ()

    def read(self, reader: Reader, offer: ToolOffer) -> Reading[None]:
        first = yield from reader.blanks()
        if not self.is_section:
            yield from reader.word(self.call_open)
            yield from self._call(reader, offer)
            if self.call_close != self.closer:
                yield from reader.blanks()
                yield from reader.word(self.closer, may_end=True)
            return
        while first != END and (yield from reader.one_of((self.call_open, self.closer))) == self.call_open:
            yield from self._call(reader, offer)
            reader.calls.commit()
            first = yield from reader.blanks()

    def _call(self, reader: Reader, offer: ToolOffer) -> Reading[None]:
        write = reader.calls.write
        # A call without arguments may lack the line break after its name.
        ends = (self.name_end,) if self.name_end != "\n" else (self.name_end, self.key_open, self.call_close)
        name = (yield from reader.until(ends, limit=_MAX_NAME)).strip()
        reader.calls.begin(name)
        mark, separator = reader.ended_by, "{"
        while True:
            if mark not in (self.key_open, self.call_close):
                yield from reader.blanks()
                mark = yield from reader.one_of((self.key_open, self.call_close))
            if mark == self.call_close:
                write("}" if separator != "{" else "{}")
                return
            key = (yield from reader.until(self.kinds or self.key_end[:1], limit=_MAX_KEY)).strip()
            is_string = reader.ended_by in self.kinds[:1]
            for marker in self.key_end[1:]:
                yield from reader.blanks()
                yield from reader.word(marker)
            write(f'{separator}"{escaped(key)}": ')
            yield from self._value(reader, offer.by_name[name], key, is_string=is_string)
            mark, separator = "", ", "

    def _value(self, reader: Reader, tool: Tool, key: str, *, is_string: bool) -> Reading[None]:
        write, ends = reader.calls.write, (self.pad + self.value_end, self.value_end)
        if self.pad and (yield from reader.peek()) == self.pad:
            yield from reader.take()
        types = types_of(tool.properties.get(key), tool.parameters)
        if self.kinds:
            types = (types & _STRINGS if is_string else types - _STRINGS) or types
        if types != _STRINGS:
            write(json_of((yield from reader.until(ends)), types))
            return
        write('"')
        yield from reader.until(ends, lambda text: write(escaped(text)))
        write('"')

    def written(self, calls: Sequence[WrittenCall]) -> str:
        bodies = []
        for call in calls:
            pairs = [
                f"{self.key_open}{key}{self._key_end(value)}{self.pad}{as_text(value)}{self.pad}"
                f"{self.value_end}{self.line}"
                for key, value in call.pairs.items()
            ]
            bodies.append(f"{self.call_open}{call.name}{self._behind_name}{''.join(pairs)}{self.call_close}")
        if self.is_section:
            return self.line.join([self.opener, *bodies, self.closer])
        ends = self.line + self.closer if self.call_close != self.closer else ""
        before = self.line if self.call_open else ""
        return "\n".join(f"{self.opener}{before}{body}{ends}" for body in bodies)

    def _key_end(self, value: Any) -> str:
        return self.kinds[not isinstance(value, str)] if self.kinds else self.line.join(self.key_end)

    @property
    def _behind_name(self) -> str:
        return self.name_end if self.name_end == "\n" else self.name_end + self.line

    def grammar(self, writer: GrammarWriter) -> str:
        call = writer.call(lambda tool: self.call_grammar(writer, tool))
        if self.is_section:
            several = writer.calls(call, writer.word(self.line))
            return writer.grammar(
                f"{writer.word(self.line)} {several} {writer.words(self.line, self.closer)}", (self.opener,)
            )
        before = [self.line] if self.call_open else []
        ending = [self.line, self.closer] if self.call_close != self.closer else []
        whole = writer.rule(" ".join(filter(None, (writer.words(*before), call, writer.words(*ending)))))
        return writer.grammar(writer.calls(whole, writer.words("\n", self.opener)), (self.opener,))

    def call_grammar(self, writer: GrammarWriter, tool: Tool) -> str:
        """Return an expression for one call, without the markers around all."""

        def argument(key: str, schema: Any) -> str:
            opening = writer.words(self.key_open, key, *_between(self.key_end, self.line))
            return f"{opening} {self._value_grammar(writer, tool, schema)} {writer.word(self.line)}"

        pairs = [(argument(key, schema), is_required) for key, schema, is_required in writer.named_arguments(tool)]
        behind_name = [self.name_end] if self.name_end == "\n" else [self.name_end, self.line]
        opening = writer.words(*[self.call_open] * bool(self.call_open), tool.name, *behind_name)
        return f"{opening} {writer.sequence(pairs, '')} {writer.word(self.call_close)}"

    def _value_grammar(self, writer: GrammarWriter, tool: Tool, schema: Any) -> str:
        if not self.kinds:
            return writer.tagged(tool, schema, self.pad, self.value_end)
        strings, others = strings_and_others(schema, tool.parameters)
        ways = [f"{writer.word(self.kinds[0])} {writer.tagged(tool, strings, '', self.value_end)}"] if strings else []
        if others or not ways:
            value = writer.value(tool, others or schema)
            ways.append(f"{writer.word(self.kinds[1])} {value} {writer.word(self.value_end)}")
        return writer.rule(" | ".join(ways))

    def format(self, name: str) -> CallFormat:
        words = dict.fromkeys((
            self.opener, self.closer, self.call_open, *[self.name_end] * self.name_end.startswith("<"), self.key_open,
            *self.key_end, self.value_end, self.call_close,
        ))  # fmt: skip
        return CallFormat(
            name,
            read=self.read,
            written=self.written,
            grammar=self.grammar,
            words=tuple(word for word in words if len(word) > 1),
            openers=(self.opener,),
        )


def _between(words: Sequence[str], separator: str) -> list[str]:
    """Return the words with the separator between them."""
    found = [word for one in words for word in (separator, one)]
    return found[1:]
