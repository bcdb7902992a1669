"""Calls in braces: keys without quotes, strings between markers; the notation of functiongemma and Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewick.errors import UnsupportedError
from pagewick.text.tool_calls.alternatives import alternatives, choices_of, properties_of, required_of, types_within
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.python_calls import entries
from pagewick.text.tool_calls.reading import MAX_DEPTH, NoCall, Reader, Reading, Write, escaped, no_write
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
# Levels of nested values whose notation the grammar knows.
_MAX_GRAMMAR_DEPTH = 4
_SCALARS = frozenset({"number", "integer", "boolean", "null"})
# A key that its schema does not name, as a regular expression.
_KEY = r"[^\s:,{}\[\]<>\"'\/][^:,{}\[\]<>\"'\/]*"
# Keywords of arrays and objects that the grammar cannot keep.
_UNKEPT = {
    "any": ("allOf", "not", "if"),
    "array": ("prefixItems", "additionalItems", "unevaluatedItems", "contains", "uniqueItems"),
    "object": (
        "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties", "maxProperties",
        "dependentRequired", "dependentSchemas",
    ),
}  # fmt: skip


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


class _Braces:
    """Writes the grammar of the arguments of one tool. quote: the marker on both sides of a string."""

    def __init__(self, writer: GrammarWriter, tool: Tool, quote: str) -> None:
        self._writer = writer
        self._quote = quote
        self._tool = tool
        self._rules: dict[tuple[str, int], str | None] = {}  # of values: a schema may refer to itself from many places

    def arguments(self) -> str:
        """Return an expression for all arguments. Raises UnsupportedError for a strict tool that it cannot keep."""
        found = self._object(self._writer.named_arguments(self._tool), 0)
        if found is None:
            message = (
                f"the strict tool {self._tool.name!r} requires values within more than {_MAX_GRAMMAR_DEPTH} others, or "
                "values that nothing fits; simplify its parameters"
            )
            raise UnsupportedError(message, param="tools")
        return found

    def _object(self, properties: Sequence[tuple[str, Any, bool]], depth: int) -> str | None:
        """Return an expression for an object; None if it requires a value without one."""
        pairs = []
        for key, schema, is_required in properties:
            value = self._value(schema, depth)
            if value is not None:
                pairs.append((f"{self._writer.word(f'{key}:')} {value}", is_required))
            elif is_required:
                return None
        return f'"{{" {self._writer.sequence(pairs, ",")} "}}"'

    def _value(self, schema: Any, depth: int) -> str | None:
        """Return a rule for a value; None if the tool is strict and the value lies too deep in others."""
        place = json.dumps(schema), depth
        if place not in self._rules:
            options = alternatives(schema, self._tool.parameters)
            texts = [{**one, "type": "string"} for one in options if "string" in types_within(one)]
            found = [f"{self._writer.word(self._quote)} {self._text(texts)}"] if texts else []
            found += [way for one in options for way in self._ways(one, depth)]
            if not found and not self._tool.is_strict:
                found = [self._writer.value(self._tool, schema)]
            self._rules[place] = self._writer.rule(" | ".join(found)) if found else None
        return self._rules[place]

    def _text(self, texts: Sequence[Mapping[str, Any]]) -> str:
        return self._writer.tagged(self._tool, {"anyOf": texts}, "", self._quote)

    def _ways(self, option: Mapping[str, Any], depth: int) -> Iterator[str]:
        """Yield an expression for each way to write a value that is no string."""
        types = types_within(option) - {"string"}
        if (choices := choices_of(option)) is not None:
            if others := [one for one in choices if not isinstance(one, str)]:
                yield self._writer.value(self._tool, {"enum": others})
            return
        if scalars := types & _SCALARS:
            kept = sorted(scalars - {"integer"} if "number" in scalars else scalars)
            yield self._writer.value(self._tool, {**option, "type": kept})
        if "array" in types:
            self._check_kept(option, (*_UNKEPT["array"], *_UNKEPT["any"]))
            yield from self._array(option, depth)
        if "object" in types:
            self._check_kept(option, (*_UNKEPT["object"], *_UNKEPT["any"]))
            yield from self._any_object(option, depth)

    def _check_kept(self, option: Mapping[str, Any], keywords: Sequence[str]) -> None:
        found = [key for key in keywords if option.get(key) not in (None, False)]
        found += ["items"] * isinstance(option.get("items"), list)
        if self._tool.is_strict and found:
            message = (
                f"this model writes arguments in a notation of its own, where {found[0]!r} cannot be kept; leave it "
                f"out of the strict tool {self._tool.name!r}"
            )
            raise UnsupportedError(message, param="tools")

    def _array(self, option: Mapping[str, Any], depth: int) -> Iterator[str]:
        least, most = _count(option.get("minItems")) or 0, _count(option.get("maxItems"))
        if least == 0:
            yield '"[]"'
        fewest = max(1, least)
        if depth == _MAX_GRAMMAR_DEPTH or option.get("items") is False or (most is not None and most < fewest):
            return
        if (one := self._value(option.get("items", {}), depth + 1)) is not None:
            # llguidance refuses {0,0}.
            more = "" if most == 1 else f'("," {one}){{{fewest - 1},{"" if most is None else most - 1}}}'
            yield f'"[" {one} {more} "]"'

    def _any_object(self, option: Mapping[str, Any], depth: int) -> Iterator[str]:
        """An object with the properties that the schema names or, if it names none, with any."""
        properties, required = properties_of(option), required_of(option)
        if not required:
            yield '"{}"'
        if depth == _MAX_GRAMMAR_DEPTH:
            return
        others = option.get("additionalProperties", True)
        if named := {**properties, **{key: {} for key in required if key not in properties}}:
            found = self._object([(key, one, key in required) for key, one in named.items()], depth + 1)
            yield from [found] if found is not None else []
        elif others is not False and (value := self._value(others, depth + 1)) is not None:
            pair = self._writer.rule(f'/{_KEY}/ ":" {value}')
            yield f'"{{" {pair} ("," {pair})* "}}"'


def _count(value: Any) -> int | None:
    """Read a number of items: JSON may write it as 2.0."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return max(0, int(value)) if is_whole and not isinstance(value, bool) else None
