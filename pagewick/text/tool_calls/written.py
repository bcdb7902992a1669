"""WrittenCall: a call that a format writes into a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class WrittenCall(NamedTuple):
    """arguments: JSON, normally an object."""

    name: str
    arguments: str

    @property
    def pairs(self) -> Mapping[str, Any]:
        """The arguments one by one; none if they are not an object."""
        try:
            found = json.loads(self.arguments, strict=False)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def envelope(call: WrittenCall, name_key: str = "name", arguments_key: str = "arguments") -> str:
    """Return the call as a JSON object."""
    return f'{{"{name_key}": {json.dumps(call.name)}, "{arguments_key}": {call.arguments}}}'


def as_text(value: Any) -> str:
    """Return a value as tagged formats write it: a string as it stands, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
