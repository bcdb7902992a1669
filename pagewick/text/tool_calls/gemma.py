"""Gemma 3 writes Python in a fence of Markdown; functiongemma and Gemma 4 have a notation in braces between tokens."""

from __future__ import annotations

from pagewick.text.tool_calls.braces import BraceCalls
from pagewick.text.tool_calls.fenced import FencedCalls

GEMMA_3 = FencedCalls("```tool_code", "```").format("gemma3")
FUNCTION_GEMMA = BraceCalls("<start_function_call>", "<end_function_call>", "<escape>").format("functiongemma")
GEMMA_4 = BraceCalls("<|tool_call>", "<tool_call|>", '<|"|>').format("gemma4")
