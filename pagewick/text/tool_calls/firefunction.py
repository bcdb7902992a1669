"""FireFunction v2: the word `functools` and a JSON list."""

from __future__ import annotations

from pagewick.text.tool_calls.json_calls import JsonCalls

# The word alone is the name of a module of Python's, too.
FIREFUNCTION_2 = JsonCalls("functools[", is_list=True).format("firefunction")
