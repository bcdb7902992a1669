"""ToolOffer: the tools that a response may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pagewick.text.tool_calls.alternatives import (
    alternatives,
    merged_properties,
    properties_of,
    required_of,
    types_within,
)

Mode = Literal["none", "auto", "required"]
Form = Literal["json", "text"]
# Keywords beside `properties` that may allow further properties of an object.
_OPEN_KEYWORDS = frozenset({
    "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of the offered tools a response calls.

    mode: none, as the model likes (auto), or at least one (required). names: only these tools; None: all.
    is_parallel: whether a response may have several calls.
    """

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: the JSON schema of the arguments, which are an object. is_strict: the client's word `strict`."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> Tool:
        """Read a checked tool in OpenAI's form."""
        function = tool["function"]
        return cls(function["name"], function.get("parameters") or {}, bool(function.get("strict")))

    @property
    def forms(self) -> list[Mapping[str, Any]]:
        """The alternatives that the parameters have; mostly one."""
        return [one for one in alternatives(self.parameters, self.parameters) if "object" in types_within(one)]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the arguments by name, of all forms."""
        return merged_properties(self.forms)

    @property
    def required(self) -> frozenset[str]:
        """The names of the arguments that all forms require."""
        names = [frozenset(required_of(form)) for form in self.forms]
        return names[0].intersection(*names[1:]) if names else frozenset()

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of a call's arguments: an object without properties that the tool's schema does not name."""
        schema = {"type": "object", **self.parameters}
        if not _OPEN_KEYWORDS & schema.keys():
            schema["additionalProperties"] = False
            properties = properties_of(schema)
            missing: dict[str, Any] = {key: {} for key in required_of(schema) if key not in properties}
            if missing:
                schema["properties"] = {**properties, **missing}
        return schema


@dataclass(frozen=True)
class ToolOffer:
    """tools: the tools that may be called. is_required: at least one has to be. is_parallel: several may be.

    form: the form that a response without calls must have, if any. No text then precedes calls.
    """

    tools: Sequence[Tool] = field(default_factory=tuple)
    is_required: bool = False
    is_parallel: bool = True
    form: Form | None = None

    @property
    def has_form(self) -> bool:
        return self.form is not None

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> ToolOffer | None:
        """tools: checked, in OpenAI's form. Return None if no tool may be called."""
        if not tools or choice.mode == "none":
            return None
        wanted = [tool for tool in map(Tool.of, tools) if choice.names is None or tool.name in choice.names]
        return cls(tuple(wanted), choice.mode == "required", choice.is_parallel)

    @cached_property
    def by_name(self) -> Mapping[str, Tool]:
        return {tool.name: tool for tool in self.tools}
