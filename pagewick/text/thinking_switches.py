"""The variables by which chat templates switch thinking on and off."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pagewick.text.reasoning import ReasoningTags

# Our documentation names the first.
THINKING_SWITCHES = ("enable_thinking", "thinking")
# Seed-OSS's template reads how many tokens of thought it has; none switches thinking off.
BUDGET_VARIABLE = "thinking_budget"
# MiniMax-M3's template reads from this what enable_thinking says elsewhere.
_MODE = "thinking_mode"
# The switch of templates by the model's opening tag. Others may have a variable of this name for something else.
_SWITCH_OF = {"<|START_THINKING|>": "reasoning"}  # North Mini


def has_switch(read: Collection[str], tags: ReasoningTags | None) -> bool:
    """Return whether a template that reads these variables can switch thoughts between these tags on or off."""
    return not {*THINKING_SWITCHES, BUDGET_VARIABLE, _MODE, _other_switch(tags)}.isdisjoint(read)


def with_switches(variables: Mapping[str, Any], tags: ReasoningTags | None) -> dict[str, Any]:
    """Return a template's variables, a switch among them under every name that templates have for it."""
    switch = next((variables[name] for name in THINKING_SWITCHES if name in variables), None)
    if switch is None:
        return {**variables}
    found = {**dict.fromkeys(THINKING_SWITCHES, switch), _MODE: "enabled" if switch else "disabled"}
    if (other := _other_switch(tags)) is not None:
        found[other] = bool(switch)
    return {**found, **({BUDGET_VARIABLE: 0} if switch is False else {}), **variables}


def _other_switch(tags: ReasoningTags | None) -> str | None:
    return None if tags is None else _SWITCH_OF.get(tags.start)
