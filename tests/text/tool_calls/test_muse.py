"""Muse Glimmer: thoughts, text and calls in messages to their recipients, wherever the text is cut; its grammar."""

from __future__ import annotations

import os
import random

import pytest

from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import grammar_of
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.written import WrittenCall
from tests.deep import IS_DEEP
from tests.text.tool_calls.families import CALLS, TOOLS
from tests.text.tool_calls.later_forms import muse
from tests.text.tool_calls.marked_parts import MarkedFormat, Parts
from tests.text.tool_calls.test_formats import mutated
from tests.text.tool_calls.test_newer_families import CALL, FamilyServer, parts_of
from tests.text.tool_calls.test_prompts_with_tools import ASK, CALLED, prompt, result
from tests.text.tool_calls.test_prompts_with_tools import TOOLS as FUNCTIONS

MUSE = MarkedFormat("muse_glimmer")
NEXT = "<|eom|><|start|>assistant"
THOUGHT = f" to=self<|message|>Hm {{<{NEXT}"
ANSWER = " to=user<|message|>It is warm."
ROME = muse([("get_weather", {"city": "Zürich"})])
HM, WARM, WEATHER = ("reasoning", "Hm {<"), ("text", "It is warm."), ("get_weather", '{"city": "Zürich"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANSWER}<|eot|>", [WARM]),
        ("<|message|>It is warm.", [WARM]),
        (f"{THOUGHT}{ANSWER}", [HM, WARM]),
        (f"{THOUGHT}{ROME}<|eot|>", [HM, WEATHER]),
        (f"{THOUGHT}{ANSWER}{NEXT}{ROME}", [HM, WARM, WEATHER]),
        (f"<|start|>assistant{ROME}", [WEATHER]),
        (f"{ROME}{NEXT} to=now<|message|>none", [WEATHER, ("text", "none")]),
        (" to=self<|message|>Hm", [("reasoning", "Hm")]),
        ("No message.", [("text", "No message.")]),
        (" to=us all, assistants", [("text", " to=us all, assistants")]),
        ("assist", [("text", "assist")]),
        (f"{' ' * 200}x", [("text", f"{' ' * 200}x")]),
        ("", []),
    ],
)
def test_parts_wherever_the_text_is_cut(text: str, expected: Parts) -> None:
    for has_tokens in (False, True):
        MUSE.check_cuts(text, expected, has_tokens=has_tokens)
        if expected[-1:] == [WEATHER]:
            MUSE.check_cuts(text, expected, has_tokens=has_tokens, is_guided=True)
    assert MUSE.parts(THOUGHT + ANSWER, offer=None) == [HM, WARM]


def test_several_calls_and_one_where_one_is_allowed() -> None:
    assert [name for name, _ in MUSE.parts(muse(CALLS))] == ["get_weather", "now", "mix-it_2"]  # the last twice
    alone = MUSE.parts(muse(CALLS), offer=ToolOffer(TOOLS, is_parallel=False))
    assert alone[0][0] == "get_weather" and {kind for kind, _ in alone[1:]} == {"text"}
    other = muse([("unknown", {"a": "x"})])
    assert MUSE.parts(other, has_tokens=False) == [("text", other.partition("<|message|>")[2])]


def test_broken_responses_lose_no_text() -> None:
    rng = random.Random(f"muse{os.getpid() if IS_DEEP else ''}")
    for _ in range(10_000 if IS_DEEP else 30):
        broken = mutated(f"{THOUGHT}{ANSWER}{NEXT}{ROME}<|eot|>", rng)
        for has_tokens in (False, True):
            cuts = sorted(rng.randrange(len(broken) + 1) for _ in range(3))
            assert MUSE.parts(broken, *cuts, has_tokens=has_tokens) == MUSE.parts(broken, has_tokens=has_tokens)
            MUSE.parts(broken, *cuts, is_guided=True, has_tokens=has_tokens)


@pytest.mark.parametrize("is_required", [False, True])
def test_the_grammar(is_required: bool) -> None:
    lark = MUSE.lark(ToolOffer(TOOLS, is_required=is_required))
    for text in (ROME, muse(CALLS), THOUGHT + ROME, THOUGHT + THOUGHT + ROME):
        assert MUSE.accepts(lark, text)
    for text in (ANSWER, THOUGHT + ANSWER, f"{THOUGHT}{ANSWER}{NEXT}{ROME}"):
        assert MUSE.accepts(lark, text) is not is_required
    for text in (
        "It is warm.",
        THOUGHT,
        muse([("unknown", {})]),
        muse([("get_weather", {"days": 3})]),
        ROME.replace("to=get_weather", "to=now"),
    ):
        assert not MUSE.accepts(lark, text)
    one = MUSE.lark(ToolOffer(TOOLS, is_parallel=False))
    assert MUSE.accepts(one, ROME) and not MUSE.accepts(one, muse(CALLS))


def test_a_form_stands_in_the_text() -> None:
    answer = grammar_of(StructuredOutputsParams(choice=("yes", "no")), GrammarLimits())
    alone, beside = MUSE.form_lark(), MUSE.lark(ToolOffer(TOOLS, form="text"))
    for lark in (alone, beside):
        assert MUSE.accepts(lark, " to=user<|message|>yes", answer)
        assert MUSE.accepts(lark, f"{THOUGHT} to=user<|message|>no", answer)
        for text in ("yes", " to=user<|message|>maybe", f"{ANSWER}{NEXT} to=user<|message|>yes"):
            assert not MUSE.accepts(lark, text, answer)
    assert MUSE.accepts(beside, THOUGHT + ROME, answer) and not MUSE.accepts(alone, ROME, answer)


def test_it_is_written_as_it_is_read() -> None:
    calls = [WrittenCall("get_weather", '{"city": "Rome\\n"}'), WrittenCall("now", "{}")]
    assert MUSE.form.written(calls) == muse([*CALL, ("now", {})])


def test_a_server() -> None:
    response = f" to=self<|message|>I look.{NEXT} to=user<|message|>So:{NEXT}{muse(CALL)}"
    assert parts_of(FamilyServer("Muse-Glimmer", response).message()) == ("I look.", "So:", CALL)
    text = prompt("Muse-Glimmer", ASK, CALLED, result("c1", "windy"), tools=FUNCTIONS)
    assert f"<|start|>assistant{muse([('get_weather', {'city': 'Rome'})])}<|eot|>" in text
    assert text.endswith("<|start|>tool get_weather<|message|>windy<|eot|><|start|>assistant")
