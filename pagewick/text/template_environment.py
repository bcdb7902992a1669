"""The Jinja environment for chat templates: what transformers offers, with the unbounded parts bounded.

A template comes with a model, so it is code from a stranger. Jinja's sandbox keeps it away from Python's
internals. What the sandbox lets through is memory and time, so here every step of a loop, every call and every
operation is counted against a budget, and one that would make a huge value is refused before it is carried out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pagewick.text.control_tokens import CUT
from pagewick.text.template_budget import ITEM_BYTES, check_size, current
from pagewick.text.template_operations import (
    check_binop,
    check_format,
    check_method,
    checked_filter,
    checked_test,
    made_by_method,
)

MAX_JSON_INDENT = 16
# What Jinja gives to every call, and takes out again.
JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})
# Tests that only look at what a value is; the others read it.
QUICK_TESTS = frozenset(
    {"boolean", "callable", "defined", "even", "false", "filter", "float", "integer", "iterable", "mapping", "none"}
    | {"number", "odd", "sameas", "sequence", "string", "test", "true", "undefined", "divisibleby", "escaped"}
)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Its templates can be rendered within a `budget()` only."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: checked_filter(name, function) for name, function in self.filters.items()}
        for name in self.tests.keys() - QUICK_TESTS:
            self.tests[name] = checked_test(cast(Callable[..., Any], self.tests[name]))
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _PublicNamespace

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **kwargs)

    # Parts of every compiled template.

    def step(self) -> str:
        """Counts one step of a loop or one call of a macro."""
        current().step()
        return ""

    def weighed(self, value: Any) -> Any:
        """The value, which is about to be compared or looked up."""
        spent = current()
        spent.check_time()
        spent.weigh(value)
        return value

    def written(self, value: Any) -> str:
        """The text of a value that is written out."""
        if type(self.weighed(value)) is str:
            return str(value)
        text: str = current().made(str(value))
        return text

    def sliced(self, value: Any) -> Any:
        """The value, a slice that was just made."""
        return current().made(value)

    def concatenate(self, *values: Any) -> str:
        """The `~` operator."""
        return self.concat([self.written(value) for value in values])

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a macro, a block or a `set` from its parts."""
        texts, num_chars = [], 0
        for part in parts:
            num_chars += len(part)
            check_size(num_chars)
            texts.append(part)
        text: str = current().made("".join(texts))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spent = current()
        spent.check_time()
        check_binop(operator, left, right)
        return spent.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.weighed(argument) if isinstance(argument, tuple) else argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in ("translate", "maketrans", "encode"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(str(value.__self__), "{", [*args, *kwargs.values()])
            text: str = current().made(wrapper(*args, **kwargs))
            return text

        return checked

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spent = current()
        spent.check_time()
        spent.charge(ITEM_BYTES * (len(args) + len(kwargs)))  # an object may keep them
        owner = getattr(__obj, "__self__", None)
        is_made = __obj is dict or owner is dict  # by a method of the class: dict.fromkeys
        if not is_made and not isinstance(owner, str | list | tuple | dict | LoopContext):
            return super().call(__context, __obj, *args, **kwargs)
        listed = [spent.listed(value) if isinstance(value, Iterator) else value for value in args]
        options = [value for name, value in kwargs.items() if name not in JINJAS_OWN]
        check_method(__obj.__name__, owner, [*listed, *options])
        return made_by_method(owner, super().call(__context, __obj, *listed, **kwargs))


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for us it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as in the base class)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _PublicNamespace(Namespace):
    """A namespace that holds nothing which Python or Jinja would look for by itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        own, *values = args  # no name of a parameter, so that a template may use each
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace in the template is given the unsafe name {name!r}")


_Looping = nodes.For | nodes.Macro | nodes.CallBlock


class _Meter(NodeTransformer):
    """Makes a template count its own steps."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        counted = self._count(node)
        if node.test is not None:  # what it passes over is a step too
            node.test = nodes.Or(_call("step", []), node.test).set_lineno(node.lineno)
        return counted

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes).set_lineno(node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        known = (nodes.TemplateData, nodes.Const)
        node.nodes = [each if isinstance(each, known) else _call("written", [each]) for each in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _weighed(node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("sliced", [node]).set_lineno(node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def _count(self, node: _Looping) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", [])).set_lineno(node.lineno))
        return node


def _call(name: str, values: list[nodes.Expr]) -> nodes.Call:
    """A call of a method of the environment, which no variable of the template can hide."""
    return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("weighed", [node])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own, no character is written as an HTML entity; the signature is transformers'.
    spaces = indent if isinstance(indent, int) else len(indent or "")
    if max(spaces, *map(len, separators or [""])) > MAX_JSON_INDENT:
        raise SecurityError("tojson is given too large an indent or separator")
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    parts, num_chars = [], 0
    for part in encoder.iterencode(value):
        num_chars += len(part)
        check_size(num_chars)
        parts.append(part)
    text = "".join(parts)
    if not ensure_ascii:
        return text
    # A cut must survive the escaping; outside of strings JSON is ASCII anyway.
    return "".join(char if char.isascii() or char == CUT else json.dumps(char)[1:-1] for char in text)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    check_format(pattern, "%", [])
    return datetime.now().strftime(pattern)
