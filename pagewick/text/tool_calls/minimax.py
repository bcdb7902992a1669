"""MiniMax-M2: invocations with parameters in tags, all in one section."""

from __future__ import annotations

from pagewick.text.tool_calls.tagged import TaggedCalls

MINIMAX_M2 = TaggedCalls(
    opener="<minimax:tool_call>",
    closer="</minimax:tool_call>",
    call_open='<invoke name="',
    name_end='">',
    key_open='<parameter name="',
    key_end=('">',),
    value_end="</parameter>",
    call_close="</invoke>",
    is_section=True,
).format("minimax_m2")
