"""TemplateReading: in which form a chat template wants what it reads of a message.

OpenAI's forms and those that templates were written for differ in three places. Which one a template was written for
is seen in its syntax: in the loops, tests and filters that it applies to `message.content` and to
`tool_call.function.arguments`, or to a name that it gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, cast

from jinja2 import nodes

# Filters that go through the parts of a list.
_PART_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
# A name for a name for a name ...: so many are followed. A template may come with a request, and be meant to be slow.
_MAX_ALIASES = 8

_Node = TypeVar("_Node", bound=nodes.Node)


class Arguments(Enum):
    """The arguments of a tool call, which OpenAI's form has as a JSON text."""

    OBJECT = "object"  # it writes them as JSON by itself, or one by one
    TEXT = "text"  # it only puts them between other texts
    AS_GIVEN = "as given"  # it looks which of both they are


@dataclass(frozen=True, slots=True)
class TemplateReading:
    """has_parts: content that is a list of parts is gone through; else it must be one text.
    has_none: a content that is not there is told by `is none`; else it must be undefined.
    """

    has_parts: bool
    has_none: bool
    arguments: Arguments

    @classmethod
    def of(cls, tree: nodes.Template) -> TemplateReading:
        """tree: the parsed template."""
        syntax = _Syntax(tree)
        content, arguments = _Uses(syntax, "content"), _Uses(syntax, "arguments")
        return cls(
            has_parts=content.is_looped_over or bool(content.filters & _PART_FILTERS),
            has_none="none" in content.tests or content.is_compared_with_none,
            arguments=_form_of_arguments(arguments),
        )


def _form_of_arguments(uses: _Uses) -> Arguments:
    if uses.tests & {"string", "mapping"}:
        return Arguments.AS_GIVEN
    is_object = uses.filters or uses.is_looped_over or uses.has_members
    return Arguments.TEXT if uses.is_joined and not is_object else Arguments.OBJECT


class _Syntax:
    """The nodes of a template by their type, collected once."""

    def __init__(self, tree: nodes.Template) -> None:
        self._nodes: dict[type[nodes.Node], list[nodes.Node]] = {}
        for node in tree.find_all(nodes.Node):
            self._nodes.setdefault(type(node), []).append(node)
        parameters = {macro.name: [arg.name for arg in macro.args] for macro in self.all(nodes.Macro)}
        # What a name is set to, or a macro's parameter is given.
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
    """What a template does with an attribute of that name, of whatever it may be."""

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
        self.is_joined = any(map(self._is_value, _joined(syntax)))

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


def _joined(syntax: _Syntax) -> Iterator[nodes.Node]:
    """Everything that is written out or joined to a text."""
    for operation in syntax.all(nodes.Add):
        yield from (operation.left, operation.right)
    for concatenation in syntax.all(nodes.Concat):
        yield from concatenation.nodes
    for output in syntax.all(nodes.Output):
        yield from output.nodes
