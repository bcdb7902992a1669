"""Outputs are plain data."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pagewick.outputs import CompletionOutput, PartDelta, PartKind, ToolCall


def test_an_output_can_be_written_as_json() -> None:
    parts = [PartDelta(PartKind.REASONING, "Hm."), PartDelta(PartKind.TOOL_CALL, "{}", ToolCall(0, "call_1", "add"))]
    written = json.loads(json.dumps(asdict(CompletionOutput(0, text="", reasoning="Hm.", parts=parts))))
    assert written["parts"] == [
        {"kind": "reasoning", "text": "Hm.", "call": None},
        {"kind": "tool_call", "text": "{}", "call": {"index": 0, "call_id": "call_1", "name": "add"}},
    ]


def test_a_long_output_grows_in_place() -> None:
    """A copy is made before its original goes, so that it has another address."""
    output = CompletionOutput(0)
    addresses = []
    for kind in (PartKind.TEXT, PartKind.REASONING):
        for _ in range(1000):
            output.add([PartDelta(kind, "token ")])
            addresses.append((id(output.text), id(output.reasoning), id(output.parts[-1].text)))
    assert (output.text, output.reasoning) == ("token " * 1000, "token " * 1000)
    num_kept = sum(one == other for one, other in pairwise(addresses))
    assert num_kept > len(addresses) // 2


def test_a_long_text_grows_in_place_and_is_kept_once() -> None:
    output = CompletionOutput(0)
    addresses = []
    for _ in range(1000):
        output.add_text("token ")
        addresses.append(id(output.text))
        assert output.parts[0].text is output.text
    assert output.text == "token " * 1000
    assert sum(one == other for one, other in pairwise(addresses)) > len(addresses) // 2


@given(st.lists(st.tuples(st.sampled_from([None, PartKind.TEXT, PartKind.REASONING]), st.sampled_from("a😀 "))))
def test_added_texts_are_what_added_parts_are(pieces: list[tuple[PartKind | None, str]]) -> None:
    """None: `add_text`, for which `add` of a text part stands."""
    output, expected = CompletionOutput(0), CompletionOutput(0)
    for kind, text in pieces:
        if kind is None:
            output.add_text(text)
        else:
            output.add([PartDelta(kind, text)])
        expected.add([PartDelta(kind or PartKind.TEXT, text)])
    assert output == expected
