"""The Jinja environment for chat templates: what transformers offers, with the unbounded parts bounded.

A template comes with a model, so it is code from a stranger. Jinja's sandbox keeps it away from Python's
internals. What the sandbox lets through is memory and time, so here every step of a loop and every call of a
macro is counted against a budget, and an operation that would make a huge value is refused before it is
carried out.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pagewick.text.control_tokens import CUT

MAX_CHARS = 16 * 2**20  # of one value, and of the whole output
MAX_NUMBER = 10_000  # as a width or a count given to a string operation
MAX_STEPS = 1_000_000
MAX_SECONDS = 2.0  # of processor time

_deadline: ContextVar[list[float]] = ContextVar("deadline")


@contextmanager
def budget() -> Iterator[None]:
    """Bounds the steps and the processor time of a rendering inside it."""
    token = _deadline.set([MAX_STEPS, time.thread_time() + MAX_SECONDS])
    try:
        yield
    finally:
        _deadline.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        for name in (
            "center",
            "indent",
            "wordwrap",
            "batch",
            "slice",
            "truncate",
            "replace",
            "join",
            "format",
        ):
            self.filters[name] = _checked_filter(name, self.filters[name])
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)

    def step(self) -> str:
        """Counts one step of a loop or one call of a macro; part of every compiled template."""
        remaining = _deadline.get()
        remaining[0] -= 1
        if remaining[0] < 0 or time.thread_time() > remaining[1]:
            raise SecurityError("the template runs too long")
        return ""

    def concatenate(self, *values: Any) -> str:
        """The `~` operator."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in ("translate", "maketrans"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            _check_width(str(value.__self__))
        return wrapper

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_string_call(__obj.__name__, owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for us it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_Looping = nodes.For | nodes.Macro | nodes.CallBlock


class _Meter(NodeTransformer):
    """Makes a template count its own steps."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None).set_lineno(node.lineno)

    def _count(self, node: _Looping) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Jinja puts its context or environment before the value for the filters that ask for it.
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _check_string_call(name, values[0], [*values[1:], *kwargs.values()])
        return function(*args, **kwargs)

    if hasattr(function, "jinja_pass_arg"):
        checked.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return checked


def _check_string_call(name: str, owner: Any, arguments: list[Any]) -> None:
    if any(isinstance(argument, int) and argument > MAX_NUMBER for argument in arguments):
        raise SecurityError(f"{name} is given a number above {MAX_NUMBER}")
    if name == "replace" and len(arguments) >= 2:
        _check_size(len(str(owner)) + str(owner).count(str(arguments[0])) * len(str(arguments[1])))
    if name == "join" and arguments:
        # `separator.join(items)` as a method, `items | join(separator)` as a filter
        items, separator = (arguments[0], owner) if isinstance(owner, str) else (owner, arguments[0])
        if hasattr(items, "__len__"):
            _check_size(len(items) * len(str(separator)))
    if name == "format":  # the filter; the methods go through wrap_str_format
        _check_width(str(owner))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_size(len(left) + len(right))
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                _check_size(len(sequence) * count)
    elif operator == "%" and isinstance(left, str):
        _check_width(left)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if num_bits > MAX_NUMBER:
            raise SecurityError("a number in the template becomes too large")


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise SecurityError(f"a value in the template becomes longer than {MAX_CHARS} characters")


def _check_width(pattern: str) -> None:
    if re.search(r"\d{5}|%[^a-zA-Z]*\*|\{[^}]*\{", pattern):
        raise SecurityError("a format in the template has too large a width")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own, no character is written as an HTML entity; the signature is transformers'.
    if isinstance(indent, int) and indent > MAX_NUMBER:
        raise SecurityError("tojson is given too large an indent")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # A cut must survive the escaping; outside of strings JSON is ASCII anyway.
    return "".join(char if char.isascii() or char == CUT else json.dumps(char)[1:-1] for char in text)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    _check_width(pattern)
    return datetime.now().strftime(pattern)
