"""Checks of the values of SamplingParams, which return them as plain Python: numpy's scalars become int or float.

All of them raise InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from pagewick.errors import InvalidRequestError

TOKEN_LIMIT = 2**31
_MAX_SHOWN = 100  # characters of a wrong value in an error message


def tuple_of(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequestError(f"{name} must be a list; got {shown(value)}", param=name)
    return tuple(value)


def token_ids(name: str, values: tuple[Any, ...], max_tokens: int) -> tuple[int, ...]:
    """Return the token ids without duplicates."""
    # There may be a million: they are checked one by one only to convert them or to name the wrong one.
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > TOKEN_LIMIT:
        values = tuple(integer(name, value, 0, TOKEN_LIMIT, ": a token id") for value in values)
    unique = tuple(dict.fromkeys(values))
    if len(unique) > max_tokens:
        raise InvalidRequestError(f"{name} must name at most {max_tokens} tokens; got {len(unique)}", param=name)
    return unique


def check_words(name: str, words: tuple[object, ...], max_words: int, max_bytes: int) -> None:
    if len(words) > max_words:
        raise InvalidRequestError(f"{name} must be at most {max_words} strings; got {len(words)}", param=name)
    for word in words:
        if not isinstance(word, str) or not 0 < len(word.encode("utf-8", "surrogatepass")) <= max_bytes:
            raise InvalidRequestError(
                f"{name} must hold strings of 1 to {max_bytes} bytes; got {shown(word)}", param=name
            )


def biases(name: str, value: object, max_tokens: int) -> dict[int, float]:
    """Return the bias of each token."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must map token ids to numbers; got {shown(value)}", param=name)
    if len(value) > max_tokens:
        raise InvalidRequestError(f"{name} must name at most {max_tokens} tokens; got {len(value)}", param=name)
    found: dict[int, float] = {}
    for key, bias in value.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = integer(name, int(key) if is_digits else key, 0, TOKEN_LIMIT, ": a token id")
        if token_id in found:
            raise InvalidRequestError(f"{name} names token {token_id} twice", param=name)
        found[token_id] = number(name, bias, -100.0, 100.0, ": a bias")
    return found


def integer(name: str, value: object, low: int, high: int, what: str = "") -> int:
    # The comparison of types comes first, since it is quick and all requests over HTTP have plain numbers.
    if type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool)):
        plain = value if type(value) is int else int(value)
        if low <= plain <= high:
            return plain
    wanted = f"an integer from {low} to {high}"
    raise InvalidRequestError(f"{name}{what} must be {wanted}; got {shown(value)}", param=name)


def number(name: str, value: object, low: float, high: float, what: str = "", *, is_positive: bool = False) -> float:
    """is_positive: low is 0, and 0 is wrong."""
    plain: float | None = None
    if type(value) is float or type(value) is int:
        plain = value
    elif isinstance(value, Real) and not isinstance(value, bool):
        # A fraction may be too large for a float.
        with suppress(OverflowError):
            plain = float(value)
    if plain is not None and low <= plain <= high and (plain or not is_positive):
        return plain
    wanted = f"above 0 and at most {high:g}" if is_positive else f"a number from {low:g} to {high:g}"
    raise InvalidRequestError(f"{name}{what} must be {wanted}; got {shown(value)}", param=name)


def shown(value: object) -> str:
    """Format a value for an error message, shortened because a client may have sent anything."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
