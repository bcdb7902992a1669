"""Keywords of a JSON schema that llguidance does not keep exactly, rewritten with others that it does.

llguidance reads numbers of more than 15 digits with an error in the last one. Its dates and times include 1900-02-29
and 10:00:60, which RFC 3339 does not. For numbers, it ignores formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

# Numbers beyond this are not exact in llguidance.
_MAX_NUMBER = 2**53
_MAX_DIGITS = 15
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Years from 0001 on, and those of them that have a February 29.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"
_DAY = "(?:" + "|".join((
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)) + ")"  # fmt: skip
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
# Format -> a regular expression for the whole of a string.
FORMAT_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
# Formats of OpenAPI for whole numbers. Those of 64 bits are bounded as far as llguidance reads such bounds.
_RANGES = {
    f"{sign}int{bits}": {"minimum": low, "maximum": high}
    for bits in (8, 16, 32)
    for sign, low, high in (("", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1), ("u", 0, 2**bits - 1))
} | {"int64": {"minimum": 2**10 - 2**63, "maximum": 2**63 - 2**10}, "uint64": {"minimum": 0}}
# Formats of OpenAPI that allow any value of the type.
_ANY_VALUE = ("float", "double", "password")
# Values with which a keyword restricts nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "not": (False,),
}


def inexact_keywords(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keywords of one schema, without those within it, that have a number which llguidance cannot read."""
    yield from (name for name in ("const", "enum", "multipleOf") if name in schema and not _is_exact(schema[name]))
    for name in BOUNDS:
        value = schema.get(name)
        if isinstance(value, int | float) and not abs(value) <= _MAX_NUMBER:
            yield name


def rewrite_keywords(schema: dict[str, Any]) -> None:
    """Change one schema, without those within it: it then allows a part of the values that it allowed before."""
    for name, values in _WITHOUT_EFFECT.items():
        if any(schema.get(name) == value and type(schema[name]) is type(value) for value in values):
            del schema[name]
    for name in BOUNDS:
        if isinstance(value := schema.get(name), float):
            schema[name] = _round_bound(name, value)
    for name, value in _of_format(schema).items():
        if name in schema:
            others = schema.get("allOf", [])
            schema["allOf"] = [*(others if isinstance(others, list) else [others]), {name: value}]
        else:
            schema[name] = value


def _of_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove a format that other keywords express; return these keywords."""
    name = schema.get("format")
    if not isinstance(name, str):
        return {}
    if name == "hostname":
        return {"maxLength": 253}
    is_number = schema.get("type") in ("integer", "number")
    if name not in FORMAT_PATTERNS and name not in _ANY_VALUE and not (is_number and name in _RANGES):
        return {}
    del schema["format"]
    return {"pattern": f"^{FORMAT_PATTERNS[name]}$"} if name in FORMAT_PATTERNS else _RANGES.get(name, {})


def _round_bound(name: str, value: float) -> float:
    """Round a bound inwards to the digits that llguidance reads."""
    rounding = ROUND_CEILING if name.endswith("inimum") else ROUND_FLOOR
    return float(Context(_MAX_DIGITS, rounding).create_decimal(repr(value)))


def _is_exact(value: Any) -> bool:
    match value:
        case dict():
            return all(map(_is_exact, value.values()))
        case list():
            return all(map(_is_exact, value))
        case float():
            return abs(value) <= _MAX_NUMBER and len(Decimal(repr(value)).normalize().as_tuple().digits) <= _MAX_DIGITS
        case int():
            return abs(value) <= _MAX_NUMBER
    return True
