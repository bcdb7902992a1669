"""DeepSeek V3.2 and V4: invocations with parameters in tags of its own, which say whether a value is a string."""

from __future__ import annotations

from dataclasses import replace

from pagewick.text.tool_calls.tagged import TaggedCalls

_MARK = "\uff5cDSML\uff5c"

_CALLS = TaggedCalls(
    opener=f"<{_MARK}function_calls>",
    closer=f"</{_MARK}function_calls>",
    call_open=f'<{_MARK}invoke name="',
    name_end='">',
    key_open=f'<{_MARK}parameter name="',
    key_end=(),
    kinds=('" string="true">', '" string="false">'),
    value_end=f"</{_MARK}parameter>",
    call_close=f"</{_MARK}invoke>",
    is_section=True,
)
DEEPSEEK_3_2 = _CALLS.format("deepseek_v32")
DEEPSEEK_4 = replace(_CALLS, opener=f"<{_MARK}tool_calls>", closer=f"</{_MARK}tool_calls>").format("deepseek_v4")
