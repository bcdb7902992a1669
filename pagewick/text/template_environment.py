"""The Jinja environment for chat templates: what transformers offers, in Jinja's immutable sandbox, with limits.

A template comes with a model or with a request, so it is code from a stranger. The sandbox keeps it away from Python's
internals. Two limits keep it from occupying the server: a rendering may take MAX_SECONDS of processor time, checked at
every step of a loop, every call and every operator; and no text or list that it builds may exceed MAX_CHARS.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
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

MAX_CHARS = 16 * 2**20
MAX_SECONDS = 2.0
_MAX_EXPONENT = 64

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


@contextmanager
def time_limit() -> Iterator[None]:
    """Limit the renderings inside to MAX_SECONDS of this thread's processor time."""
    token = _deadline.set(time.thread_time() + MAX_SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"the template makes a text or list longer than {MAX_CHARS}")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
    return value


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates that raise SecurityError when they exceed a limit; see `time_limit`."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_InsertChecks().visit(source), *args, **kwargs)

    def check_time(self) -> str:
        """Raises SecurityError if the rendering has taken too long. Compiled templates call this in every loop."""
        if time.thread_time() > _deadline.get():
            raise SecurityError(f"the template takes more than {MAX_SECONDS} seconds")
        return ""

    def concat(self, parts: Iterable[str]) -> str:
        """Join the parts of a macro, a block, a `set` or the operator `~`."""
        texts, num_chars = [], 0
        for part in parts:
            num_chars += len(part)
            _check_size(num_chars)
            texts.append(part)
        return "".join(texts)

    def concatenate(self, *values: Any) -> str:
        """Compiled templates call this for the operator `~`."""
        return self.concat(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        if operator == "**" and (abs(right) > _MAX_EXPONENT or abs(left) > 2**_MAX_EXPONENT):
            raise SecurityError("the template computes too large a power")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                    _check_size(len(sequence) * count)
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_time()
        return _checked(super().call(__context, __obj, *args, **kwargs))


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _InsertChecks(NodeTransformer):
    """Makes a template check the time in its loops and macros, and the size of what it concatenates."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # also called for items that the test rejects
            node.test = nodes.Or(_call("check_time", []), node.test).set_lineno(node.lineno)
        return self._check_in_body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes).set_lineno(node.lineno)

    def _check_in_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check_time", [])).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = _check_in_body


def _call(name: str, values: list[nodes.Expr]) -> nodes.Call:
    """Call a method of the environment; no variable of the template can hide it."""
    return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Unlike Jinja's own filter, this escapes no character as an HTML entity. The signature is transformers'.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    # A cut must survive the escaping. Outside of strings JSON is ASCII anyway.
    return "".join(char if char.isascii() or char == CUT else json.dumps(char)[1:-1] for char in text)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
