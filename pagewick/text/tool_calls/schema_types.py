"""The types that a JSON schema allows for a value, as formats need them that write values without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewick.text.tool_calls.alternatives import alternatives, types_within


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that the schema allows; all if it does not tell. root: the schema to which $ref refers."""
    return frozenset[str]().union(*map(types_within, alternatives(schema, root)))


def refuse_constant(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
