"""GigaChat 3 and 3.1: one JSON object behind the tokens that begin a message with a call."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

# These tokens include line breaks.
GIGACHAT_3 = JsonCalls("<|message_sep|>\n\n", header=("function call", "<|role_sep|>\n"), is_single=True).format(
    "gigachat3"
)
GIGACHAT_3_1 = JsonCalls("<|function_call|>", is_single=True).format("gigachat31")
