"""InternLM: JSON between tokens, the second of which says that a plugin is called and no interpreter."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

INTERNLM = JsonCalls(
    "<|action_start|>",
    "<|action_end|>",
    header=("<|plugin|>", "\n"),
    separator="",
    arguments_key="parameters",
).format("internlm")
