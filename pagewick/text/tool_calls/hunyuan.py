"""Hunyuan: a name and JSON in a Markdown fence, in a section of tags; a JSON list in these tags for vLLM's template.

Hy3 has tags around keys and values, all of which end in `:opensource`; those of its preview do not.
"""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls
from pagewick.text.tool_calls.sections import SectionCalls
from pagewick.text.tool_calls.splitter import CallFormat
from pagewick.text.tool_calls.tagged import TaggedCalls

_OPENER, _CLOSER = "<tool_calls>", "</tool_calls>"

HUNYUAN = SectionCalls(
    opener=_OPENER,
    closer=_CLOSER,
    call_open="<tool_call>",
    name_end="\n```json",
    gap="\n",
    pad="\n```",
    call_close="</tool_call>",
    separator="\n",
).format("hunyuan_fenced")
# Apriel and Jamba, too, write calls so.
HUNYUAN_LIST = JsonCalls(_OPENER, _CLOSER, is_list=True).format("hunyuan_a13b")


def _hy_3(name: str, ending: str) -> CallFormat:
    def tag(word: str) -> str:
        return f"<{word}{ending}>"

    return TaggedCalls(
        opener=tag("tool_calls"),
        closer=tag("/tool_calls"),
        call_open=tag("tool_call"),
        name_end=tag("tool_sep"),
        key_open=tag("arg_key"),
        key_end=(tag("/arg_key"), tag("arg_value")),
        value_end=tag("/arg_value"),
        call_close=tag("/tool_call"),
        is_section=True,
    ).format(name)


HY_3 = _hy_3("hy_v3", ":opensource")
HY_3_PREVIEW = _hy_3("hy_v3_preview", "")
