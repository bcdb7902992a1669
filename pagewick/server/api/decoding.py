"""Decodes the body of a request.

Every optional field may be null, which is the same as leaving it out. A field is in one of four places: in the
request's struct; among the dialect's unsupported ones, which are refused unless the value asks for nothing; among its
harmless ones, which change no response; or nowhere. A field that is nowhere is ignored, and the response says so; a
strict server refuses it. The fields of objects inside the body are treated in the same way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

import msgspec

from pagewick.errors import InvalidRequestError
from pagewick.server.api.field_errors import field_error
from pagewick.server.api.known_fields import OPENAI_FIELDS, KnownFields, refusal_of
from pagewick.server.api.nested_fields import EMPTY, Nested, nested_fields, unknown_inside
from pagewick.server.core.limits import check_nesting

MAX_NAMED = 16
# Upper limit of the characters of a name that are shown and compared with the names of fields.
MAX_NAME_CHARS = 64

_OBJECTS = list[dict[str, msgspec.Raw]]

_Request = TypeVar("_Request", bound=msgspec.Struct)


def decode_request(
    body: bytes, kind: type[_Request], *, strict: bool = False, known: KnownFields = OPENAI_FIELDS
) -> tuple[_Request, list[str]]:
    """Return the request in a body, and the names of ignored fields.

    Raises InvalidRequestError, with the field's name if one field is wrong.
    """
    if not body.strip(b" \t\r\n"):
        raise InvalidRequestError("the body is not valid JSON: it is empty; send an object with the request's fields")
    check_nesting(body)
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        _refuse_unsupported(values, kind, known)
        request = msgspec.json.decode(body, type=kind)
        ignored = _ignored(values, kind, known)
    except msgspec.ValidationError as error:
        raise field_error(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(body, error)}") from None
    if strict and ignored:
        nested = _nested(kind, known)
        inner = [f"{path}.{name}" for path, names in nested.items() for name in sorted(names)]
        raise _unknown_fields(ignored, [*kind.__struct_fields__, *inner])
    return request, ignored


def _reason(body: bytes, error: Exception) -> str:
    """Say why a body is not JSON; msgspec counts the position of a wrong byte from the beginning of its string."""
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"it is not UTF-8 (byte {wrong.start})"
    return str(error).removeprefix("JSON is malformed: ")


def harmless_name(name: str) -> str:
    """Return a name that a client chose with only the characters that are safe in a header and a log."""
    return re.sub(r"[^\w.\[\]-]", "?", name[:MAX_NAME_CHARS], flags=re.ASCII)


def _refuse_unsupported(values: dict[str, msgspec.Raw], kind: type[msgspec.Struct], known: KnownFields) -> None:
    """Skips the fields that this route's struct has; best_of, for example, is a field of one route only."""
    for name in sorted((known.unsupported.keys() & values.keys()) - set(kind.__struct_fields__)):
        refusal = refusal_of(name, msgspec.json.decode(values[name]), known)
        if refusal is not None:
            raise refusal


def _ignored(values: dict[str, msgspec.Raw], kind: type[msgspec.Struct], known: KnownFields) -> list[str]:
    expected = {*kind.__struct_fields__, *known.unsupported, *known.harmless}
    names = [name for name in values if name not in expected]
    names += unknown_inside(values, _nested(kind, known))
    has_messages = "messages" in kind.__struct_fields__ and bytes(values.get("messages", b"null")) != b"null"
    if has_messages and known.in_messages:
        names += _ignored_in_messages(values["messages"], known)
    return names


def _nested(kind: type[msgspec.Struct], known: KnownFields) -> Nested:
    """Return the fields of the objects that a request may have; both the struct and the dialect may name them."""
    found = dict(nested_fields(kind))
    for path, names in known.inside.items():
        if path.partition(".")[0].removesuffix("[]") in kind.__struct_fields__:
            found[path] = names.union(found.get(path, ()))
    return found


def _ignored_in_messages(messages: msgspec.Raw, known: KnownFields) -> list[str]:
    names: dict[str, None] = {}
    for message in msgspec.json.decode(messages, type=_OBJECTS):
        names |= dict.fromkeys(_unknown_in(message, known.in_messages, "messages[]"))
        names |= dict.fromkeys(_unknown_in_parts(message, known, "messages[].content[]"))
    return list(names)


def _unknown_in_parts(owner: Mapping[str, msgspec.Raw], known: KnownFields, path: str) -> Iterator[str]:
    """Yield the paths of unknown fields of parts, and of parts within these. Other types are refused as such."""
    content = owner.get("content", msgspec.Raw(b""))
    if not bytes(content).lstrip().startswith(b"["):
        return
    for part in msgspec.json.decode(content, type=_OBJECTS):
        kind = msgspec.json.decode(part.get("type", msgspec.Raw(b"null")))
        if isinstance(kind, str) and kind in known.in_parts:
            yield from _unknown_in(part, known.in_parts[kind], path)
            for name, value in part.items():
                if (fields := known.in_parts.get(f"{kind}.{name}")) and bytes(value).lstrip().startswith(b"{"):
                    inner = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
                    yield from _unknown_in(inner, fields, f"{path}.{name}")
            yield from _unknown_in_parts(part, known, f"{path}.content[]")


def _unknown_in(values: Mapping[str, msgspec.Raw], expected: Collection[str], path: str) -> Iterator[str]:
    return (f"{path}.{name}" for name, value in values.items() if name not in expected and bytes(value) not in EMPTY)


def _unknown_fields(names: list[str], fields: Collection[str]) -> InvalidRequestError:
    shown = []
    for name in names[:MAX_NAMED]:
        near = difflib.get_close_matches(name[:MAX_NAME_CHARS], fields, n=1, cutoff=0.75)
        shown.append(harmless_name(name) + (f" (did you mean {near[0]}?)" if near else ""))
    message = f"this server takes no unknown fields; leave out: {', '.join(shown)}"
    return InvalidRequestError(message, param=harmless_name(names[0]), code="unknown_parameter")
