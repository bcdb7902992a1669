"""Outputs are plain data."""

from __future__ import annotations

import json
from dataclasses import asdict

from pagewick.outputs import CompletionOutput, PartDelta, PartKind, ToolCall


def test_an_output_can_be_written_as_json() -> None:
    parts = [PartDelta(PartKind.REASONING, "Hm."), PartDelta(PartKind.TOOL_CALL, "{}", ToolCall(0, "call_1", "add"))]
    written = json.loads(json.dumps(asdict(CompletionOutput(0, text="", reasoning="Hm.", parts=parts))))
    assert written["parts"] == [
        {"kind": "reasoning", "text": "Hm.", "call": None},
        {"kind": "tool_call", "text": "{}", "call": {"index": 0, "call_id": "call_1", "name": "add"}},
    ]
