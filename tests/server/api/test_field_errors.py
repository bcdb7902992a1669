"""The words of errors about fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from pagewick.server.api.field_errors import field_error


class Inner(Struct):
    size: float
    shape: str | list[int] | None = None


class Body(Struct):
    form: Literal["", "json"] | dict[str, Any] | None = None
    mode: Literal["on", "off"] | None = None
    count: int | None = None
    few: Annotated[int, Meta(ge=1)] | None = None
    is_on: bool | None = None
    inner: list[Inner] | Inner | None = None
    names: Annotated[list[str], Meta(max_length=1)] | None = None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"count": "3"}, "count", "count: expected an integer, got a string"),
        ({"count": 1.5}, "count", "count: expected an integer, got a number that is not an integer"),
        ({"few": 0}, "few", "few: expected an integer >= 1"),
        ({"is_on": 1}, "is_on", "is_on: expected true or false, got an integer"),
        ({"inner": True}, "inner", "inner: expected an object or an array, got a boolean"),
        ({"inner": {"size": []}}, "inner.size", "inner.size: expected a number, got an array"),
        ({"inner": {"size": None}}, "inner.size", "inner.size: expected a number, got null"),
        ({"inner": {}}, "inner.size", "inner.size is missing"),
        ({"inner": [{"size": 1, "shape": 2}]}, "inner[0].shape", "inner[0].shape: expected a string or an array, got "
         "an integer"),
        ({"form": "xml"}, "form", "form: Invalid enum value 'xml'; accepted: \"\", json, an object"),
        ({"mode": "of"}, "mode", "mode: Invalid enum value 'of'; accepted: off, on"),
        ({"names": ["a", "b"]}, "names", "names: expected an array of length <= 1"),
        ({"names": ["a", {}]}, "names[1]", "names[1]: expected a string, got an object"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", ["", "input[2]"])
def test_types_are_named_in_words(fields: dict[str, Any], param: str, message: str, at: str) -> None:
    with pytest.raises(msgspec.ValidationError) as found:
        msgspec.json.decode(msgspec.json.encode(fields), type=Body)
    error = field_error(found.value, Body, at)
    place = f"{at}." if at else ""
    assert (error.param, str(error)) == (place + param, place + message)


def test_a_body_that_is_no_object() -> None:
    with pytest.raises(msgspec.ValidationError) as found:
        msgspec.json.decode(b"[]", type=Body)
    error = field_error(found.value, Body)
    assert (error.param, str(error)) == (None, "the body is not a request: expected an object, got an array")
