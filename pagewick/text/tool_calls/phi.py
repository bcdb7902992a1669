"""Phi-4-mini: a JSON list between tokens; some of its prompts make it write `functools` before the list."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

PHI_4_MINI = JsonCalls("<|tool_call|>", "<|/tool_call|>", is_list=True, other_openers=("functools[",)).format(
    "phi4_mini_json"
)
