"""Hermes and Qwen: each call is a JSON object between tags."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

HERMES = JsonCalls("<tool_call>", "</tool_call>", pad="\n").format("hermes")
