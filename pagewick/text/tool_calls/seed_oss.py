"""Seed-OSS: a function with its parameters in tags, as Qwen3-Coder has it, but with values without line breaks."""

from __future__ import annotations

from dataclasses import replace

from pagewick.text.tool_calls.qwen_coder import QWEN_CALLS

_CALLS = replace(QWEN_CALLS, opener="<seed:tool_call>", closer="</seed:tool_call>", pad="")
# The chat template writes every role alike, that of results too.
SEED_OSS = replace(_CALLS.format("seed_oss"), has_result_role=True)
