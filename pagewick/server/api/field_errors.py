"""Says which field of a request is wrong, and why, in words that need no knowledge of types in Python."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pagewick.errors import InvalidRequestError

# Upper limit of the characters of a body that an error repeats.
MAX_QUOTED_CHARS = 200

_EXPECTED = re.compile(r"^Expected `([a-z]+(?: \| [a-z]+)*)`")
_GOT = re.compile(r", got `([a-z]+)`$")
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
}
_VALUES = _TYPES | {"float": "a number that is not an integer", "bool": "a boolean"}


def field_error(error: msgspec.ValidationError, kind: type[msgspec.Struct], at: str = "") -> InvalidRequestError:
    """Name the field. msgspec says "Expected `int`, got `str` - at `$.max_tokens`", where `$` is an object of the kind.

    at: the path of that object; empty for the whole body.
    """
    reason, _, path = str(error).rpartition(" - at `$")
    if not reason:
        reason, path = path, ""
    if len(reason) > MAX_QUOTED_CHARS:
        reason = reason[:MAX_QUOTED_CHARS] + "..."
    if reason.startswith(("Invalid enum value", "Invalid value")) and (values := _accepted_values(kind, path)):
        reason += "; accepted: " + ", ".join(values)
    param = (at + path.rstrip("`")).lstrip(".")
    if match := re.search(r"missing required field `(\w+)`", reason):
        param = f"{param}.{match[1]}" if param else match[1]
        return InvalidRequestError(f"{param} is missing", param=param)
    reason = _in_words(reason)
    message = f"{param}: {reason}" if param else f"the body is not a request: {reason}"
    return InvalidRequestError(message, param=param or None)


def _in_words(reason: str) -> str:
    """Return "expected an integer, got a string" for "Expected `int | null`, got `str`". Clients know about null."""
    reason = _EXPECTED.sub(lambda match: f"expected {_any_of(match[1].split(' | '))}", reason)
    return _GOT.sub(lambda match: f", got {_VALUES.get(match[1], match[1])}", reason)


def _any_of(types: list[str]) -> str:
    *first, last = [_TYPES[name] for name in types if name in _TYPES] or types
    return f"{', '.join(first)} or {last}" if first else last


def _accepted_values(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Return, in words, what the field at a path like `.messages[0].role` accepts; empty if it is not an enum."""
    places: list[Any] = [msgspec.inspect.type_info(kind)]
    for name, _ in re.findall(r"\.(\w+)|(\[)", path):
        places = [inner for place in places for inner in _inside(place, name)]
    kinds = [place for place in places if isinstance(place, msgspec.inspect.LiteralType)]
    objects = ["an object"] * any(isinstance(place, msgspec.inspect.DictType) for place in places)
    return [str(value) or '""' for kind in kinds for value in kind.values] + (objects if kinds else [])


def _inside(place: Any, name: str) -> list[Any]:
    """Return the types that the field of a struct, or the entries of a list if the name is empty, may have."""
    if name and getattr(place, "tag_field", None) == name:
        # A struct without fields stands for a kind of object that is refused with a reason of its own.
        return [msgspec.inspect.LiteralType((place.tag,))] if place.fields else []
    inner = [field.type for field in getattr(place, "fields", ()) if field.encode_name == name]
    if not name and isinstance(place, msgspec.inspect.ListType):
        inner = [place.item_type]
    return [one for found in inner for one in getattr(found, "types", (found,))]
