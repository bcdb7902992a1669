"""The fields of objects inside a request, such as stream_options, and those of a client's that are unknown."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

# Values that ask for nothing: clients send all fields of an object, whether they have a use for them or not.
EMPTY = (b"null", b"[]", b"{}", b'""', b"false")

# Path of an object -> its fields. In a path, `[]` stands for the entries of a list: "tools[].function".
Nested = Mapping[str, frozenset[str]]


@functools.cache
def nested_fields(kind: type[msgspec.Struct]) -> Nested:
    """Return the fields of all structs inside a struct, without those of messages."""
    found: dict[str, frozenset[str]] = {}
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        if field.encode_name != "messages":
            _add_fields(found, field.encode_name, field.type)
    return found


def _add_fields(found: dict[str, frozenset[str]], path: str, kind: Any) -> None:
    for one in getattr(kind, "types", (kind,)):
        if isinstance(one, msgspec.inspect.ListType):
            _add_fields(found, f"{path}[]", one.item_type)
        elif isinstance(one, msgspec.inspect.StructType):
            found[path] = frozenset(field.encode_name for field in one.fields)
            for field in one.fields:
                _add_fields(found, f"{path}.{field.encode_name}", field.type)


def unknown_inside(values: Mapping[str, msgspec.Raw], nested: Nested) -> list[str]:
    """Return the paths of all fields that the objects inside a body have and that are not in `nested`."""
    # Most bodies have no such object, and large ones are read no deeper than necessary.
    inner = {path.partition(".")[0].removesuffix("[]") for path in nested}
    names: dict[str, None] = {}
    for name in filter(inner.__contains__, values):
        names |= dict.fromkeys(_unknown(name, values[name], nested))
    return list(names)


def _unknown(path: str, value: msgspec.Raw, nested: Nested) -> Iterator[str]:
    if f"{path}[]" in nested and bytes(value).lstrip().startswith(b"["):
        for entry in msgspec.json.decode(value, type=list[msgspec.Raw]):
            yield from _unknown(f"{path}[]", entry, nested)
    elif path in nested and bytes(value).lstrip().startswith(b"{"):
        for name, inner in msgspec.json.decode(value, type=dict[str, msgspec.Raw]).items():
            if name in nested[path]:
                yield from _unknown(f"{path}.{name}", inner, nested)
            elif bytes(inner) not in EMPTY:
                yield f"{path}.{name}"
