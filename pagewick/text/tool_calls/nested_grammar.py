"""NestedGrammar: writes the grammar of arguments whose nested values have a notation other than JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagewick.errors import UnsupportedError
from pagewick.text.tool_calls.alternatives import alternatives, properties_of, required_of, types_within
from pagewick.text.tool_calls.grammar import GrammarWriter
from pagewick.text.tool_calls.offer import Tool

# Levels of nested values whose notation the grammar knows.
MAX_GRAMMAR_DEPTH = 4
# Keywords of arrays and objects that the grammar cannot keep.
_UNKEPT = {
    "any": ("allOf", "not", "if"),
    "array": ("prefixItems", "additionalItems", "unevaluatedItems", "contains", "uniqueItems"),
    "object": (
        "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties", "maxProperties",
        "dependentRequired", "dependentSchemas",
    ),
}  # fmt: skip
# The name and the value of a member, as expressions, and whether it is required.
Member = tuple[str, str, bool]


class NestedGrammar:
    """Writes the grammar of the arguments of one tool. A subclass knows the notation."""

    empty_array = '""'
    empty_object = '""'

    def __init__(self, writer: GrammarWriter, tool: Tool) -> None:
        self.writer = writer
        self.tool = tool
        self._rules: dict[tuple[str, int], str | None] = {}  # of values: a schema may refer to itself from many places

    def flat_value(self, options: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield expressions for the values of these alternatives that are neither arrays nor objects."""
        raise NotImplementedError

    def members(self, members: Sequence[Member]) -> str:
        """Return an expression for an object with these members."""
        raise NotImplementedError

    def any_members(self, value: str) -> str:
        """Return an expression for an object with at least one member of any name. value: an expression."""
        raise NotImplementedError

    def items(self, value: str, fewest: int, most: int | None) -> str:
        """Return an expression for an array of `fewest` to `most` items, at least one. most: None: any number."""
        raise NotImplementedError

    def ended(self, value: str) -> str:
        """Return an expression for a value that is not text, with what ends every value."""
        return value

    def arguments(self) -> str:
        """Return an expression for all arguments. Raises UnsupportedError for a strict tool that it cannot keep."""
        found = self._object(self.writer.named_arguments(self.tool), 0)
        if found is None:
            message = (
                f"the strict tool {self.tool.name!r} requires values within more than {MAX_GRAMMAR_DEPTH} others, or "
                "values that nothing fits; simplify its parameters"
            )
            raise UnsupportedError(message, param="tools")
        return found

    def _object(self, properties: Sequence[tuple[str, Any, bool]], depth: int) -> str | None:
        """Return an expression for an object; None if it requires a value without one."""
        members: list[Member] = []
        for key, schema, is_required in properties:
            value = self._value(schema, depth)
            if value is not None:
                members.append((key, value, is_required))
            elif is_required:
                return None
        return self.members(members)

    def _value(self, schema: Any, depth: int) -> str | None:
        """Return a rule for a value; None if the tool is strict and the value lies too deep in others."""
        place = json.dumps(schema), depth
        if place not in self._rules:
            options = alternatives(schema, self.tool.parameters)
            found = [*self.flat_value(options), *(self.ended(way) for one in options for way in self._ways(one, depth))]
            if not found and not self.tool.is_strict:
                found = [self.ended(self.writer.value(self.tool, schema))]
            self._rules[place] = self.writer.rule(" | ".join(found)) if found else None
        return self._rules[place]

    def _ways(self, option: Mapping[str, Any], depth: int) -> Iterator[str]:
        """Yield an expression for each way to write a value that is an array or an object."""
        types = types_within(option)
        if "const" in option or "enum" in option:
            return
        if "array" in types:
            self._check_kept(option, (*_UNKEPT["array"], *_UNKEPT["any"]))
            yield from self._array(option, depth)
        if "object" in types:
            self._check_kept(option, (*_UNKEPT["object"], *_UNKEPT["any"]))
            yield from self._any_object(option, depth)

    def _check_kept(self, option: Mapping[str, Any], keywords: Sequence[str]) -> None:
        found = [key for key in keywords if option.get(key) not in (None, False)]
        found += ["items"] * isinstance(option.get("items"), list)
        if self.tool.is_strict and found:
            message = (
                f"this model writes arguments in a notation of its own, where {found[0]!r} cannot be kept; leave it "
                f"out of the strict tool {self.tool.name!r}"
            )
            raise UnsupportedError(message, param="tools")

    def _array(self, option: Mapping[str, Any], depth: int) -> Iterator[str]:
        least, most = _count(option.get("minItems")) or 0, _count(option.get("maxItems"))
        if least == 0:
            yield self.empty_array
        fewest = max(1, least)
        if depth == MAX_GRAMMAR_DEPTH or option.get("items") is False or (most is not None and most < fewest):
            return
        if (one := self._value(option.get("items", {}), depth + 1)) is not None:
            yield self.items(one, fewest, most)

    def _any_object(self, option: Mapping[str, Any], depth: int) -> Iterator[str]:
        """An object with the properties that the schema names or, if it names none, with any."""
        properties, required = properties_of(option), required_of(option)
        if not required:
            yield self.empty_object
        if depth == MAX_GRAMMAR_DEPTH:
            return
        others = option.get("additionalProperties", True)
        if named := {**properties, **{key: {} for key in required if key not in properties}}:
            found = self._object([(key, one, key in required) for key, one in named.items()], depth + 1)
            yield from [found] if found is not None else []
        elif others is not False and (value := self._value(others, depth + 1)) is not None:
            yield self.any_members(value)


def repeated(part: str, fewest: int, most: int | None) -> str:
    """Return an expression for a part that occurs `fewest` to `most` times. most: None: any number of times."""
    # llguidance refuses {0,0}.
    return "" if most == 0 else f"({part}){{{fewest},{'' if most is None else most}}}"


def _count(value: Any) -> int | None:
    """Read a number of items: JSON may write it as 2.0."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return max(0, int(value)) if is_whole and not isinstance(value, bool) else None
