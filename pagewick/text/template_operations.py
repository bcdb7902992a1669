"""What may become too large or take too long among the operations of a chat template: checks before they are made."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.exceptions import SecurityError

from pagewick.text.template_budget import Budget, check_items, check_size, current

MAX_NUMBER = 10_000  # as a width or a count given to a string operation
# Filters that read a text again for each of its lines, words or tags.
SLOW_FILTERS = frozenset({"wordwrap", "urlize", "striptags", "pprint", "title", "wordcount", "xmlattr"})
MAX_SLOW_CHARS = 2**16
MAX_SLOW_OPTION_CHARS = 2**10
# Those, and methods of strings, that repeat something as often as a number says.
NUMBERED = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "truncate"}
)
# Filters and methods of strings whose time is at worst the product of two lengths.
PRODUCTS = frozenset({"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"})
MAX_COMPARISONS = 2**28
# Filters that only pass on what they are given, or a part of it, without reading it. The lazy ones call others.
PASSING_FILTERS = frozenset(
    {"attr", "count", "d", "default", "first", "items", "last", "length", "map", "random", "reject", "rejectattr"}
    | {"select", "selectattr"}
)
# Filters that take a text apart into its characters.
LISTING_FILTERS = frozenset(
    {"batch", "dictsort", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select"}
    | {"selectattr", "slice", "sort", "sum", "unique"}
)
# All that ends a line is white space.
_WHITE_SPACE = "".join(char for char in map(chr, range(0x3001)) if char.isspace())


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError if the operation would make too large a value."""
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        check_size(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        check_items(len(left) + len(right))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str) and isinstance(count, int):
                check_size(len(sequence) * count)
            elif isinstance(sequence, list | tuple) and isinstance(count, int):
                check_items(len(sequence) * count)
    elif operator == "%" and isinstance(left, str):
        check_format(left, "%", [right])
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if num_bits > MAX_NUMBER:
            raise SecurityError("a number in the template becomes too large")


def check_format(pattern: str, mark: str, arguments: list[Any]) -> None:
    """mark: what each field of the pattern begins with."""
    if re.search(r"\d{5}|%[^a-zA-Z]*\*|\{[^}]*\{", pattern):
        raise SecurityError("a format in the template has too large a width")
    width = MAX_NUMBER if re.search(r"\d{3}", pattern) else 100
    check_size(len(pattern) + pattern.count(mark) * (width + sum(map(current().weigh, arguments))))


def check_method(name: str, owner: Any, arguments: list[Any]) -> None:
    """A call of a method of a string, a list or a dictionary, or of dict itself."""
    spent = current()
    for argument in (owner, *arguments) if isinstance(owner, list | tuple) else arguments:
        spent.weigh(argument)
    if isinstance(owner, str):
        check_string_call(name, owner, arguments)


def check_string_call(name: str, owner: Any, arguments: list[Any]) -> None:
    """A filter, or a method of a string."""
    if name in NUMBERED and any(isinstance(argument, int) and argument > MAX_NUMBER for argument in arguments):
        raise SecurityError(f"{name} is given a number above {MAX_NUMBER}")
    texts = [argument for argument in arguments if isinstance(argument, str)]
    match name:
        case "replace" if len(arguments) >= 2:
            check_size(len(str(owner)) + str(owner).count(str(arguments[0])) * len(str(arguments[1])))
        case "join" if arguments:
            # `separator.join(items)` as a method, `items | join(separator)` as a filter
            items, separator = (arguments[0], owner) if isinstance(owner, str) else (owner, arguments[0])
            if hasattr(items, "__len__"):
                check_size(len(items) * len(str(separator)))
        case "split" | "rsplit" | "splitlines":
            check_items(_num_parts(owner, texts))
        case "expandtabs" | "indent":
            num_places = owner.count("\t") if name == "expandtabs" else _num_parts(owner, [])
            widths = [len(one) if isinstance(one, str) else one for one in arguments if isinstance(one, str | int)]
            check_items(num_places)
            check_size(len(owner) + num_places * max([8, *widths]))
    if name in PRODUCTS and texts and len(owner) * len(texts[0]) > MAX_COMPARISONS:
        raise SecurityError(f"{name} is given too long texts")


def _num_parts(text: str, separators: list[str]) -> int:
    """At most so many."""
    return 1 + (text.count(separators[0]) if separators and separators[0] else _num_blanks(text))


def _num_blanks(text: str) -> int:
    return len(text) if len(text) < 4096 else sum(map(text.count, _WHITE_SPACE))


def checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with its time and what it makes counted."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        spent = current()
        spent.check_time()
        # Jinja puts its context or environment before the value for the filters that ask for it.
        before = 1 if hasattr(function, "jinja_pass_arg") else 0
        value, options = args[before], [*args[before + 1 :], *kwargs.values()]
        if isinstance(value, str) and name in LISTING_FILTERS:
            check_items(len(value))
        if name in PASSING_FILTERS:
            return function(*args, **kwargs)
        if isinstance(value, Iterator):
            value = spent.listed(value)
        _check_filter(spent, name, value, options)
        result = function(*args[:before], value, *args[before + 1 :], **kwargs)
        if isinstance(result, Iterator):
            result = spent.listed(result)
        return result if result is value else spent.made(result, has_new_items=True)

    return checked


def _check_filter(spent: Budget, name: str, value: Any, options: list[Any]) -> None:
    # What only copies a list does not read its items.
    weight = 0 if name in ("list", "reverse", "batch", "slice") else spent.weigh(value)
    option_weight = sum(map(spent.weigh, options))
    if name in SLOW_FILTERS and (weight > MAX_SLOW_CHARS or option_weight > MAX_SLOW_OPTION_CHARS):
        raise SecurityError(f"{name} is given more than {MAX_SLOW_CHARS} characters")
    if name == "sum" and any(isinstance(one, list | tuple) for one in options) and weight**2 > MAX_COMPARISONS:
        raise SecurityError("sum is given too many lists")
    if name == "format":
        check_format(str(value), "%", options)
    if isinstance(value, str) or name in ("join", "replace", "batch", "slice"):
        check_string_call(name, value, options)


def checked_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that compares values or reads a text through, with its time counted."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        spent = current()
        spent.check_time()
        for value in args:
            spent.weigh(value)
        return function(*args, **kwargs)

    return checked


def made_by_method(owner: Any, result: Any) -> Any:
    """The result of a method, counted."""
    spent = current()
    spent.check_time()
    if result is owner:
        return result
    if isinstance(owner, str) and isinstance(result, list | tuple):
        spent.charge(4 * len(owner))
    return spent.made(result, has_new_items=isinstance(owner, str) or owner is dict)
