"""DeepSeek V3 and R1 have the arguments in a fence of Markdown; V3.1 has them bare."""

from __future__ import annotations

from dataclasses import replace

from pagewick.text.tool_calls.sections import SectionCalls

_BAR, _GAP = "\uff5c", "\u2581"


def _token(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _GAP)}{_BAR}>"


_SEPARATOR = _token("tool sep")
_BARE = SectionCalls(
    opener=_token("tool calls begin"),
    closer=_token("tool calls end"),
    call_open=_token("tool call begin"),
    name_end=_SEPARATOR,
    call_close=_token("tool call end"),
)
_FENCED = replace(_BARE, kind=("function", _SEPARATOR), name_end="\n```json", gap="\n", pad="\n```", separator="\n")

DEEPSEEK_3 = _FENCED.format("deepseek_v3")
DEEPSEEK_3_1 = _BARE.format("deepseek_v31")
