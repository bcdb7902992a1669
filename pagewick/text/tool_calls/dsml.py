"""DeepSeek V3.2: invocations with parameters in tags of its own, each of which says whether its value is a string."""

from __future__ import annotations

from pagewick.text.tool_calls.tagged import TaggedCalls

_MARK = "\uff5cDSML\uff5c"

DEEPSEEK_3_2 = TaggedCalls(
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
).format("deepseek_v32")
