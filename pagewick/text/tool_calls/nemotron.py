"""Nemotron-H, Nano v2 and Llama-Nemotron: a JSON list between tags; Nemotron-4: an object between others.

Nemotron 3 writes calls as Qwen3-Coder does.
"""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

NEMOTRON = JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_list=True).format("nemotron_json")
NEMOTRON_4 = JsonCalls("<toolcall>", "</toolcall>", pad=" ", separator=" ").format("nemotron4")
