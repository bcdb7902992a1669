"""Command R: a JSON list of actions, between tokens since Command R7B, and in a Markdown fence in earlier models."""

from __future__ import annotations

from dataclasses import replace

from pagewick.text.tool_calls.json_calls import JsonCalls

_COMMON = JsonCalls("", is_list=True, name_key="tool_name", arguments_key="parameters")

COMMAND_R = replace(_COMMON, opener="Action: ```json", closer="```", pad="\n").format("command_r")
COMMAND_R7B = replace(_COMMON, opener="<|START_ACTION|>", closer="<|END_ACTION|>").format("command_r7b")
