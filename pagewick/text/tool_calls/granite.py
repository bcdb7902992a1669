"""Granite 3: a JSON list after a token, which later models spell as a tag."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

GRANITE = JsonCalls("<|tool_call|>", is_list=True, other_openers=("<tool_call>", "<function_call>")).format("granite")
