"""Seed-OSS: a function with its parameters in tags, as Qwen3-Coder has it, but with values without line breaks."""

from __future__ import annotations

from dataclasses import replace

from pagewick.text.tool_calls.qwen_coder import QWEN_CALLS

SEED_OSS = replace(QWEN_CALLS, opener="<seed:tool_call>", closer="</seed:tool_call>", pad="").format("seed_oss")
