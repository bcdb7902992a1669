"""Hunyuan: a name and JSON in a Markdown fence, in a section of tags; a JSON list in these tags for vLLM's template."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls
from pagewick.text.tool_calls.sections import SectionCalls

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
# Apriel, too, writes calls so.
HUNYUAN_LIST = JsonCalls(_OPENER, _CLOSER, is_list=True).format("hunyuan_a13b")
