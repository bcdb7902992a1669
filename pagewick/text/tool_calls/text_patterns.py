"""Regular expressions for values that are written without quotes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.text.grammars.exact_keywords import FORMAT_PATTERNS
from pagewick.text.tool_calls.alternatives import choices_of, types_within
from pagewick.text.tool_calls.written import as_text

ANY_TEXT = "(?s:.*)"
_WHOLE_NUMBER = "-?(0|[1-9][0-9]*)"
_PATTERNS = {
    "null": "null",
    "boolean": "true|false",
    "integer": _WHOLE_NUMBER,
    "number": rf"{_WHOLE_NUMBER}(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_FORMATS = {**FORMAT_PATTERNS, "uuid": _UUID}
_NESTED = frozenset({"array", "object"})
_LENGTHS = ("minLength", "maxLength")
_OF_TEXT = (*_LENGTHS, "format")
# The keywords that restrict the values of a type, apart from lengths of strings.
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS = {
    "string": ("pattern", "format"),
    "number": _BOUNDS,
    "integer": _BOUNDS,
    "array": ("items", "prefixItems", "additionalItems", "contains", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    ),
}  # fmt: skip
_FOR_ALL = ("allOf", "not", "if")


def literal(text: str) -> str:
    """Return a regular expression for a text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace(r"\ ", " ")


def text_pattern(options: Sequence[Mapping[str, Any]]) -> str:
    """Return a regular expression for values without quotes, some of which are any strings. options: alternatives."""
    patterns: list[str] = []
    for one in options:
        types, choices = types_within(one), choices_of(one)
        if choices is not None:
            patterns += [literal(as_text(choice)) for choice in choices]
            continue
        least, most = map(_length, (one.get(key) for key in _LENGTHS))
        format_pattern = _format_pattern(one)
        if types & _NESTED or ("string" in types and not (least or most or format_pattern)):
            return ANY_TEXT
        if "string" in types and format_pattern:
            patterns.append(format_pattern)
        elif "string" in types:
            patterns.append(f"(?s:.{{{least or 0},{most}}})")
        patterns += [_PATTERNS[kind] for kind in sorted(types & _PATTERNS.keys())]
    return f"({'|'.join(patterns)})"


def unkept_keyword(options: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a keyword that `text_pattern` does not keep exactly; None if there is none."""
    for one in options:
        types, choices = types_within(one), choices_of(one)
        if choices is None:
            keywords = [key for kind in sorted(types) for key in _KEYWORDS.get(kind, ())]
            if _format_pattern(one) is not None:
                keywords.remove("format")
            if (wrong := next((key for key in (*keywords, *_FOR_ALL) if key in one), None)) is not None:
                return wrong
        # Any other JSON of this type would be taken for it, too.
        elif any(not isinstance(choice, str | None) for choice in choices):
            return "const" if "const" in one else "enum"
    has_nested = any(types_within(one) & _NESTED for one in options)
    lost = (key for one in options for key in _OF_TEXT if key in one)
    return next(lost, None) if has_nested else None


def _format_pattern(option: Mapping[str, Any]) -> str | None:
    """Return a regular expression for the strings of a format, if it has one and nothing else restricts them."""
    name = option.get("format") if "string" in types_within(option) else None
    is_alone = not any(key in option for key in _LENGTHS)
    return _FORMATS.get(name) if isinstance(name, str) and is_alone else None


def _length(value: Any) -> str:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""
