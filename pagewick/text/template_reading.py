"""TemplateReading: the form in which a chat template expects the fields of a message.

OpenAI's forms differ in three places from those that templates were written for. A template's syntax shows which form
it expects: the loops, tests and filters that it applies to `message.content` and to `tool_call.function.arguments`,
or to a variable that holds one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, cast

from jinja2 import nodes

# Filters that iterate over the parts of a list.
_PART_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
# Tests that do not tell texts from lists.
_EXISTENCE = frozenset({"none", "defined", "undefined"})
# Filters that give an object's keys with their values.
_PAIR_FILTERS = frozenset({"dictsort", "items"})
# How many assignments of a variable to another are followed. A hostile template could have very many.
_MAX_ALIASES = 8

_Node = TypeVar("_Node", bound=nodes.Node)


class Arguments(Enum):
    """The form in which a template expects a tool call's arguments. OpenAI's API has them as a JSON string."""

    OBJECT = "object"  # the template writes them as JSON, or one by one
    TEXT = "text"  # the template concatenates them with other strings
    AS_GIVEN = "as given"  # the template tests for both forms


@dataclass(frozen=True, slots=True)
class TemplateReading:
    """has_parts: the template iterates over content that is a list of parts; otherwise content must be a string.
    needs_parts: it does nothing else with content, so that a text must be a list of one part.
    has_none: the template recognises missing content by `is none`; otherwise it must be undefined.
    """

    has_parts: bool
    needs_parts: bool
    has_none: bool
    arguments: Arguments

    @classmethod
    def of(cls, tree: nodes.Template) -> TemplateReading:
        """Analyse a parsed template."""
        syntax = _Syntax(tree)
        content, arguments = _Uses(syntax, "content"), _Uses(syntax, "arguments")
        form = Arguments.OBJECT
        if arguments.is_looped_over or arguments.has_members or arguments.filters & _PAIR_FILTERS:
            pass  # written one by one, and a template that tests for a string, too, could do no more than print it
        elif arguments.tests & {"string", "mapping"}:
            form = Arguments.AS_GIVEN
        elif arguments.is_joined and not arguments.filters:
            form = Arguments.TEXT
        has_parts = content.is_looped_over or bool(content.filters & _PART_FILTERS)
        is_text = content.is_joined or content.is_passed_on or content.tests - _EXISTENCE
        is_text = is_text or content.filters - _PART_FILTERS
        return cls(
            has_parts=has_parts,
            needs_parts=has_parts and not is_text,
            has_none="none" in content.tests or content.is_compared_with_none,
            arguments=form,
        )


class _Syntax:
    """Indexes the nodes of a template by their type."""

    def __init__(self, tree: nodes.Template) -> None:
        self._nodes: dict[type[nodes.Node], list[nodes.Node]] = {}
        for node in tree.find_all(nodes.Node):
            self._nodes.setdefault(type(node), []).append(node)
        parameters = {macro.name: [arg.name for arg in macro.args] for macro in self.all(nodes.Macro)}
        # Calls of other things than the template's macros.
        self.foreign_calls = [
            call
            for call in self.all(nodes.Call)
            if not (isinstance(call.node, nodes.Name) and call.node.name in parameters)
        ]
        # (variable, value): assignments, and arguments of macro calls.
        self.aliases: list[tuple[str, nodes.Node]] = []
        for assignment in self.all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self.aliases.append((assignment.target.name, assignment.node))
        for call in self.all(nodes.Call):
            names = parameters.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
            self.aliases += zip(names, call.args, strict=False)
            self.aliases += [(one.key, one.value) for one in call.kwargs if one.key in names]

    def all(self, kind: type[_Node]) -> list[_Node]:
        return cast(list[_Node], self._nodes.get(kind, []))


class _Uses:
    """Collects the uses of every attribute with a given name, whatever object it belongs to."""

    def __init__(self, syntax: _Syntax, attribute: str) -> None:
        self._attribute = attribute
        self._names: set[str] = set()
        for _ in range(_MAX_ALIASES):
            self._names |= {name for name, value in syntax.aliases if self._is_value(value)}
        self.tests = {test.name for test in syntax.all(nodes.Test) if self._is_value(test.node)}
        self.filters = {one.name for one in syntax.all(nodes.Filter) if self._is_value(one.node)}
        self.is_looped_over = any(self._is_value(loop.iter) for loop in syntax.all(nodes.For))
        self.is_compared_with_none = any(
            self._is_value(one.expr) and any(operand.expr == nodes.Const(None) for operand in one.ops)
            for one in syntax.all(nodes.Compare)
        )
        owners = [one.node for one in syntax.all(nodes.Getattr)] + [one.node for one in syntax.all(nodes.Getitem)]
        self.has_members = any(map(self._is_value, owners))
        written = [node for one in syntax.all(nodes.Concat) for node in one.nodes]
        written += [node for one in syntax.all(nodes.Output) for node in one.nodes]
        written += [operand for one in syntax.all(nodes.Add) for operand in (one.left, one.right)]
        self.is_joined = any(map(self._is_value, written))
        passed = [one.node for one in syntax.all(nodes.Assign) if isinstance(one.target, nodes.NSRef)]
        passed += [operand for one in syntax.all(nodes.Mod) for operand in (one.left, one.right)]
        for call in syntax.foreign_calls:
            passed += [*call.args, *(one.value for one in call.kwargs)]
            # A method, such as strip.
            passed += [call.node.node] if isinstance(call.node, nodes.Getattr) else []
        # To a method, a function, a namespace or a format, of which it is not known what they expect.
        self.is_passed_on = any(map(self._is_value, passed))

    def _is_value(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Getattr():
                return node.attr == self._attribute
            case nodes.Getitem(arg=nodes.Const() as key):
                return bool(key.value == self._attribute)
            case nodes.Getitem(arg=nodes.Slice()):
                return self._is_value(node.node)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const() as key, *_]):
                return bool(key.value == self._attribute)
            case nodes.Name():
                return node.name in self._names
            case nodes.Or() | nodes.And():
                return self._is_value(node.left) or self._is_value(node.right)
            case nodes.CondExpr():
                return self._is_value(node.expr1) or self._is_value(node.expr2)
            case nodes.Filter(name="default" | "d"):
                return self._is_value(node.node)
        return False
