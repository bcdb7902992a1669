"""The variables, other than `tools`, from which some chat templates read the tools of a request."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from typing import Any

# SmolLM3's template reads tools from these: to be called as JSON, or in Python.
TOOLS_AS_JSON, TOOLS_IN_PYTHON = "xml_tools", "python_tools"
# FireFunction v2's template reads both as texts, and fails without them.
_FUNCTIONS, _DATE = "functions", "datetime"


def tool_variables(
    read: Collection[str],
    tools: Sequence[Mapping[str, Any]] | None,
    given: Mapping[str, Any],
    *,
    in_python: bool = False,
) -> dict[str, Any]:
    """Return the variables of a template that hold the request's tools; none for most templates.

    read: the variables that the template reads. tools: in OpenAI's form. given: the client's variables, which count in
    place of these. in_python: calls are written in Python, if the template knows two ways.
    """
    found: dict[str, Any] = {}
    if {_FUNCTIONS, _DATE} <= {*read}:
        functions = [tool["function"] for tool in tools or ()]
        # A time would make every prompt differ from its first line on, and none be found in the prefix cache.
        found = {_FUNCTIONS: json.dumps(functions, indent=4, ensure_ascii=False), _DATE: date.today().isoformat()}
    name = TOOLS_IN_PYTHON if in_python else TOOLS_AS_JSON
    if tools and name in read and given.keys().isdisjoint((TOOLS_AS_JSON, TOOLS_IN_PYTHON)):
        found[name] = tools
    return {key: value for key, value in found.items() if key not in given}
