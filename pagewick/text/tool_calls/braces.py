"""Calls in braces: keys without quotes, strings between markers; the notation of functiongemma and Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewick.text.tool_calls.alternatives import choices_of, types_within
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.nested_grammar import Member, NestedGrammar, repeated
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.python_calls import entries
from pagewick.text.tool_calls.reading import MAX_DEPTH, NoCall, Reader, Reading, Write, escaped, no_write
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
_SCALARS = frozenset({"number", "integer", "boolean", "null"})
# A key that its schema does not name, as a regular expression.
_KEY = r"[^\s:,{}\[\]<>\"'\/][^:,{}\[\]<>\"'\/]*"


@dataclass(frozen=True, slots=True)
class BraceCalls:
    """A call is opener, `call:`, name, arguments in braces, closer. quote: the marker on both sides of a string."""

    opener: str
    closer: str
    quote: str

    def read(self, reader: Reader, offer: ToolOffer) -> Reading[None]:
        yield from reader.word("call:")
        reader.calls.begin((yield from reader.until(["{"], limit=160)).strip())
        yield from self._object(reader, reader.calls.write, 0)
        yield from reader.word(self.closer, may_end=True)

    def _object(self, reader: Reader, write: Write, depth: int) -> Reading[None]:
        """Read an object after its brace; its keys have no quotes."""
        write("{")
        yield from entries(reader, "}", lambda: self._pair(reader, write, depth), write)
        write("}")

    def _pair(self, reader: Reader, write: Write, depth: int) -> Reading[None]:
        if (yield from reader.peek()) == reader.spell(self.quote)[0]:
            yield from reader.word(self.quote)
            key = yield from reader.until([self.quote])
            yield from reader.char(":", no_write)
        else:
            key = yield from reader.until([":"], limit=1000)
        write(f'"{escaped(key)}": ')
        yield from self._value(reader, write, depth + 1)

    def _value(self, reader: Reader, write: Write, depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise NoCall
        char = yield from reader.blanks()
        if char == reader.spell(self.quote)[0]:
            yield from reader.word(self.quote)
            write('"')
            yield from reader.until([self.quote], lambda text: write(escaped(text)))
            write('"')
        elif char == "{":
            yield from reader.take()
            yield from self._object(reader, write, depth)
        elif char == "[":
            yield from reader.take()
            write("[")
            yield from entries(reader, "]", lambda: self._value(reader, write, depth + 1), write)
            write("]")
        elif char == "-" or char.isdecimal():
            yield from reader.number(write)
        else:
            yield from reader.keyword(_WORDS, write)

    def written(self, calls: Sequence[WrittenCall]) -> str:
        return "".join(f"{self.opener}call:{one.name}{self._written_value(one.pairs)}{self.closer}" for one in calls)

    def _written_value(self, value: Any) -> str:
        match value:
            case str():
                return f"{self.quote}{value}{self.quote}"
            case dict():
                return "{" + ",".join(f"{key}:{self._written_value(one)}" for key, one in value.items()) + "}"
            case list():
                return "[" + ",".join(map(self._written_value, value)) + "]"
            case bool() | None:
                return {True: "true", False: "false", None: "null"}[value]
        return str(value)

    def grammar(self, writer: GrammarWriter) -> str:
        def of_tool(tool: Tool) -> str:
            return f"{writer.word(f'call:{tool.name}')} {_Braces(writer, tool, self.quote).arguments()}"

        whole = writer.rule(f"{writer.call(of_tool)} {writer.word(self.closer)}")
        return writer.grammar(writer.calls(whole, writer.word(self.opener)), (self.opener,))

    def format(self, name: str) -> CallFormat:
        return CallFormat(
            name,
            read=self.read,
            written=self.written,
            grammar=self.grammar,
            words=(self.opener, self.closer, self.quote),
            openers=(self.opener,),
        )


class _Braces(NestedGrammar):
    """quote: the marker on both sides of a string."""

    empty_array = '"[]"'
    empty_object = '"{}"'

    def __init__(self, writer: GrammarWriter, tool: Tool, quote: str) -> None:
        super().__init__(writer, tool)
        self._quote = quote

    def flat_value(self, options: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        texts = [{**one, "type": "string"} for one in options if "string" in types_within(one)]
        if texts:
            text = self.writer.tagged(self.tool, {"anyOf": texts}, "", self._quote)
            yield f"{self.writer.word(self._quote)} {text}"
        for one in options:
            if (choices := choices_of(one)) is not None:
                if others := [choice for choice in choices if not isinstance(choice, str)]:
                    yield self.writer.value(self.tool, {"enum": others})
            elif scalars := types_within(one) & _SCALARS:
                kept = sorted(scalars - {"integer"} if "number" in scalars else scalars)
                yield self.writer.value(self.tool, {**one, "type": kept})

    def members(self, members: Sequence[Member]) -> str:
        pairs = [(f"{self.writer.word(f'{key}:')} {value}", is_required) for key, value, is_required in members]
        return f'"{{" {self.writer.sequence(pairs, ",")} "}}"'

    def any_members(self, value: str) -> str:
        pair = self.writer.rule(f'/{_KEY}/ ":" {value}')
        return f'"{{" {pair} ("," {pair})* "}}"'

    def items(self, value: str, fewest: int, most: int | None) -> str:
        more = repeated(f'"," {value}', fewest - 1, None if most is None else most - 1)
        return f'"[" {value} {more} "]"'
