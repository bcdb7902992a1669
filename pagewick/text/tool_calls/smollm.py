"""SmolLM3 calls tools of Python in code between tags; it writes all other calls as Hermes does."""

from __future__ import annotations

from pagewick.text.tool_calls.fenced import FencedCalls

SMOLLM_3_CODE = FencedCalls("<code>", "</code>").format("smollm3_code")
