"""Kimi K2: an id such as `functions.f:0`, which has the name and a number, followed by JSON."""

from __future__ import annotations

from pagewick.text.tool_calls.sections import SectionCalls

KIMI_K2 = SectionCalls(
    opener="<|tool_calls_section_begin|>",
    closer="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    name_end="<|tool_call_argument_begin|>",
    call_close="<|tool_call_end|>",
    prefix="functions.",
    is_numbered=True,
).format("kimi_k2", prompt_id=lambda call_id, name, place: f"functions.{name}:{place}")
