"""Command R: a JSON list of actions, between tokens since Command R7B, and in a fence of Markdown before."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

_FIELDS = {"name_key": "tool_name", "arguments_key": "parameters"}

COMMAND_R = JsonCalls("Action: ```json", "```", pad="\n", is_list=True, **_FIELDS).format("command_r")
COMMAND_R7B = JsonCalls("<|START_ACTION|>", "<|END_ACTION|>", is_list=True, **_FIELDS).format("command_r7b")
