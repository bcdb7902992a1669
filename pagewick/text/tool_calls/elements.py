"""MiniMax-M3: elements named after arguments, nested for lists and objects; each tag follows a token of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pagewick.text.tool_calls.alternatives import (
    alternatives,
    any_of,
    choices_of,
    merged_properties,
    types_within,
)
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.nested_grammar import Member, NestedGrammar, repeated
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.plain_values import json_of
from pagewick.text.tool_calls.reading import END, MAX_DEPTH, NoCall, Reader, Reading, escaped
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.written import WrittenCall

# Before each tag.
_MARK: Final = "]<]minimax[>["
_CALLS, _CALLS_END = "<tool_call>", "</tool_call>"
_CALL, _NAME_END, _CALL_END = '<invoke name="', '">', "</invoke>"
_ITEM: Final = "item"
_MAX_NAME: Final = 160
_MAX_KEY: Final = 1000
_NESTED = frozenset({"array", "object"})
# A key that its schema does not name, as a regular expression.
_KEY = r"[^\s<>\/\]][^<>\]]*"


def _read(reader: Reader, offer: ToolOffer) -> Reading[None]:
    yield from reader.word(_CALLS)
    while (yield from reader.blanks()) != END:
        yield from reader.word(_MARK)
        if (yield from reader.one_of((_CALL, _CALLS_END))) == _CALLS_END:
            return
        name = yield from reader.until((_NAME_END,), limit=_MAX_NAME)
        reader.calls.begin(name)
        tool = offer.by_name[name]
        yield from reader.blanks()
        yield from reader.word(_MARK)
        values = _Values(reader, tool.parameters)
        yield from values.members((yield from values.tag()), _CALL_END[1:-1], tool.properties, 0)
        reader.calls.commit()


class _Values:
    """Reads the values of one call. root: the schema to which $ref refers."""

    def __init__(self, reader: Reader, root: Mapping[str, Any]) -> None:
        self._reader = reader
        self._root = root
        self._write = reader.calls.write
        self._mark = reader.spell(_MARK)

    def tag(self) -> Reading[str]:
        """Read a tag behind its mark; return what is between its brackets."""
        yield from self._reader.word("<")
        return (yield from self._reader.until((">",), limit=_MAX_KEY))

    def members(
        self, key: str, end: str, properties: Mapping[str, Any], depth: int, others: Any = None
    ) -> Reading[None]:
        """Read members, whose first tag was read, up to the end's tag. others: the schema of other members."""
        separator = "{"
        while not _ends(key, end):
            self._write(f'{separator}"{escaped(key)}": ')
            # A grammar cannot demand that a key which no schema names is repeated.
            schema, is_named = properties.get(key, others), key in properties
            yield from self._value(schema, f"/{key}" if is_named else "/", depth + 1)
            separator = ", "
            key = yield from self._next_tag()
        self._write("{}" if separator == "{" else "}")

    def _items(self, end: str, schema: Any, depth: int) -> Reading[None]:
        """Read items, the first of whose tags was read, up to the end's tag."""
        self._write("[")
        yield from self._value(schema, f"/{_ITEM}", depth + 1)
        while not _ends(tag := (yield from self._next_tag()), end):
            if tag != _ITEM:
                raise NoCall
            self._write(", ")
            yield from self._value(schema, f"/{_ITEM}", depth + 1)
        self._write("]")

    def _next_tag(self) -> Reading[str]:
        yield from self._reader.blanks()
        yield from self._reader.word(_MARK)
        return (yield from self.tag())

    def _value(self, schema: Any, end: str, depth: int) -> Reading[None]:
        """Read a value and the tag at its end. end: the tag's text, or only its slash."""
        if depth > MAX_DEPTH:
            raise NoCall
        options = alternatives(schema, self._root)
        types = frozenset[str]().union(*map(types_within, options))
        if types == {"string"}:
            self._write('"')
            yield from self._reader.until((self._last(end),), lambda text: self._write(escaped(text)))
            self._write('"')
            yield from self._rest(end)
            return
        if not types & _NESTED:
            text = yield from self._reader.until((self._last(end),))
            yield from self._rest(end)
            self._write(json_of(text, types))
            return
        text = yield from self._reader.until((_MARK,))
        tag = yield from self.tag()
        if _ends(tag, end):
            self._write(json_of(text, types) if text.strip() else _empty(types))
        elif not text.strip():
            yield from self._nested(tag, end, [one for one in options if types_within(one) & _NESTED], depth)
        elif "string" in types:
            rest = yield from self._reader.until((self._last(end),))
            yield from self._rest(end)
            self._write(json.dumps(f"{text}{_MARK}<{tag}>{rest}", ensure_ascii=False))
        else:
            raise NoCall

    def _nested(self, tag: str, end: str, options: Sequence[Mapping[str, Any]], depth: int) -> Reading[None]:
        """Read a list or an object, the first of whose tags was read. options: the alternatives that allow either."""
        lists, objects = ([one for one in options if kind in types_within(one)] for kind in ("array", "object"))
        properties = merged_properties(objects)
        if tag == _ITEM and lists and _ITEM not in properties:
            yield from self._items(end, any_of([one.get("items", {}) for one in lists]), depth)
        elif objects:
            others = any_of([one.get("additionalProperties", {}) for one in objects])
            yield from self.members(tag, end, properties, depth, others)
        else:
            raise NoCall

    def _last(self, end: str) -> str:
        return f"{self._mark}<{end}>" if end != "/" else f"{self._mark}</"

    def _rest(self, end: str) -> Reading[None]:
        """Read what is left of the tag at the end of a text."""
        if end == "/":
            yield from self._reader.until((">",), limit=_MAX_KEY)


def _ends(tag: str, end: str) -> bool:
    return tag.startswith("/") if end == "/" else tag == end


def _empty(types: frozenset[str]) -> str:
    """Return the value that is written as nothing."""
    ways = {"string": '""', "array": "[]", "object": "{}"}
    return next((ways[kind] for kind in ways if kind in types), "null")


def _written(calls: Sequence[WrittenCall]) -> str:
    bodies = [f"{_MARK}{_CALL}{call.name}{_NAME_END}{_shown(call.pairs)}{_MARK}{_CALL_END}" for call in calls]
    return "\n".join([_MARK + _CALLS, *bodies, _MARK + _CALLS_END])


def _shown(value: Any) -> str:
    """Write a value as the template does, which leaves out members that are null."""
    if isinstance(value, Mapping):
        return "".join(_element(key, one) for key, one in value.items() if one is not None)
    if isinstance(value, list):
        return "".join(_element(_ITEM, one) for one in value)
    return value if isinstance(value, str) else json.dumps(value)


def _element(tag: str, value: Any) -> str:
    return f"{_MARK}<{tag}>{_shown(value)}{_MARK}</{tag}>"


def _grammar(writer: GrammarWriter) -> str:
    def of_tool(tool: Tool) -> str:
        opening = writer.words(_MARK, f"{_CALL}{tool.name}{_NAME_END}")
        return f"{opening} {_Elements(writer, tool).arguments()} {writer.words(_MARK, _CALL_END)}"

    calls = writer.calls(writer.call(of_tool), writer.word("\n"))
    return writer.grammar(
        f"{writer.words(_CALLS, chr(10))} {calls} {writer.words(chr(10), _MARK, _CALLS_END)}", (_MARK,)
    )


class _Elements(NestedGrammar):
    """Each value ends with the mark of the tag behind it."""

    def flat_value(self, options: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        flat = [one if choices_of(one) is not None else _without_nested(one) for one in options]
        has_nested = any(types_within(one) & _NESTED for one in options)
        if found := [one for one in flat if one]:
            yield self.writer.tagged(self.tool, {"anyOf": found}, "", _MARK, is_beside_marker=has_nested)

    def members(self, members: Sequence[Member]) -> str:
        return self.writer.sequence([(self._element(key, value), needed) for key, value, needed in members], "")

    def any_members(self, value: str) -> str:
        return f"({self.writer.word(_MARK)} /<{_KEY}>/ {value} /<\\/{_KEY}>/)+"

    def items(self, value: str, fewest: int, most: int | None) -> str:
        return repeated(self._element(_ITEM, value), fewest, most)

    def ended(self, value: str) -> str:
        return f"{value} {self.writer.word(_MARK)}"

    def _element(self, tag: str, value: str) -> str:
        return f"{self.writer.words(_MARK, f'<{tag}>')} {value} {self.writer.word(f'</{tag}>')}"


def _without_nested(option: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the values that are neither lists nor objects; empty if there are none."""
    types = types_within(option) - _NESTED
    kept = sorted(types - {"integer"} if "number" in types else types)
    return {**option, "type": kept} if kept else {}


MINIMAX_M3 = CallFormat(
    "minimax_m3",
    read=_read,
    written=_written,
    grammar=_grammar,
    words=(_MARK, _CALLS, _CALLS_END),
    openers=(_MARK,),
)
