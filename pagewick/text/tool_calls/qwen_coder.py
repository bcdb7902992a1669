"""Qwen3-Coder: a function with its parameters in tags, each value on lines of its own; MiMo's have no line breaks."""

from __future__ import annotations

from dataclasses import replace

from pagewick.text.tool_calls.tagged import TaggedCalls

QWEN_CALLS = TaggedCalls(
    opener="<tool_call>",
    closer="</tool_call>",
    call_open="<function=",
    name_end=">",
    key_open="<parameter=",
    key_end=(">",),
    value_end="</parameter>",
    call_close="</function>",
    pad="\n",
)
QWEN_3_CODER = QWEN_CALLS.format("qwen3_coder")
MIMO = replace(QWEN_CALLS, pad="").format("mimo")
