"""Kimi K3: thoughts, text and calls in sections, wherever the text is cut; its grammar."""

from __future__ import annotations

import os
import random

import pytest

from pagewick.errors import UnsupportedError
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.written import WrittenCall
from tests.deep import IS_DEEP
from tests.text.tool_calls.families import CALLS, TOOLS
from tests.text.tool_calls.later_forms import kimi_k3
from tests.text.tool_calls.marked_parts import MarkedFormat, Parts
from tests.text.tool_calls.test_formats import mutated
from tests.text.tool_calls.test_newer_families import CALL, FamilyServer, parts_of
from tests.text.tool_calls.test_prompts_with_tools import ASK, CALLED, encoder, prompt, result
from tests.text.tool_calls.test_prompts_with_tools import TOOLS as FUNCTIONS

KIMI = MarkedFormat("kimi_k3")
HEAD = '<|open|>message role="assistant"<|sep|>'
THINKING, SPEAKING = f"{HEAD}<|open|>think<|sep|>", f"{HEAD}<|open|>response<|sep|>"
THOUGHT = "Hm {<<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|>"
LAST = "<|close|>message<|sep|><|end_of_msg|>"
ROME = kimi_k3([("get_weather", {"city": "Zürich"})])
HM, WARM, WEATHER = ("reasoning", "Hm {<"), ("text", "It is warm."), ("get_weather", '{"city": "Zürich"}')


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        (THINKING, f"{THOUGHT}It is warm.{END}{LAST}", [HM, WARM]),
        (THINKING, f"{THOUGHT}{END}{ROME}{LAST}", [HM, WEATHER]),
        (THINKING, f"{THOUGHT}It is warm.{END}{ROME}", [HM, WARM, WEATHER]),
        (THINKING, "Hm {<", [HM]),
        (SPEAKING, f"It is warm.{END}{LAST}", [WARM]),
        (SPEAKING, f"{END}{ROME}{LAST}", [WEATHER]),
        ("", f"{THINKING}{THOUGHT}It is warm.{END}", [HM, WARM]),
        (SPEAKING, "<|open|>", [("text", "<|open|>")]),
        (SPEAKING, f"<|close|>{'x' * 300}<|sep|>", [("text", f"<|close|>{'x' * 300}<|sep|>")]),
        (SPEAKING, "a<|open|>b<|sep|>c", [("text", "a<|open|>b<|sep|>c")]),
        (SPEAKING, "", []),
    ],
)
def test_parts_wherever_the_text_is_cut(begun: str, text: str, expected: Parts) -> None:
    KIMI.check_cuts(text, expected, begun=begun, has_tokens=False)
    if expected[-1:] == [WEATHER]:
        KIMI.check_cuts(text, expected, begun=begun, is_guided=True)
    if "<|" not in expected[-1:]:
        shown = [(kind, piece) for kind, piece in KIMI.parts(text, begun=begun)]
        assert [kind for kind, _ in shown] == [kind for kind, _ in expected]


def test_calls_of_all_types() -> None:
    for has_tokens in (False, True):
        found = KIMI.parts(f"{THOUGHT}{END}{kimi_k3(CALLS[:3])}", begun=THINKING, has_tokens=has_tokens)
        assert [kind for kind, _ in found] == ["reasoning", "get_weather", "now", "mix-it_2"]
        deep = '"xs": [1, -2.5, 3e-07], "deep": {"a": "q", "b": 0}, "kind": "b c", "maybe": null}'
        assert found[3][1] == '{"flag": true, ' + deep
    alone = KIMI.parts(f"{END}{kimi_k3(CALLS)}", begun=SPEAKING, offer=ToolOffer(TOOLS, is_parallel=False))
    assert alone[0][0] == "get_weather" and {kind for kind, _ in alone[1:]} == {"text"}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('<|open|>json type="object"<|sep|>{"city": "x"}<|close|>json<|sep|>', '{"city": "x"}'),
        ('<|open|>argument key="city" type="string"<|sep|>12<|close|>argument<|sep|>', '{"city": "12"}'),
        ('<|open|>argument key="a&amp;&quot;b" type="string"<|sep|><|close|>argument<|sep|>', '{"a&\\"b": ""}'),
        ("", "{}"),
        ('<|open|>argument key="city"<|sep|>x<|close|>argument<|sep|>', None),
        ('<|open|>json type="object"<|sep|>{"city": <|close|>json<|sep|>', None),
        ("x", None),
    ],
)
def test_arguments_in_other_forms(body: str, arguments: str | None) -> None:
    call = f'<|open|>call tool="get_weather" index="1"<|sep|>{body}<|close|>call<|sep|>'
    found = KIMI.parts(f"{END}<|open|>tools<|sep|>{call}<|close|>tools<|sep|>", begun=SPEAKING, has_tokens=False)
    if arguments is None:
        assert [kind for kind, _ in found] == ["text"]
    else:
        assert found == [("get_weather", arguments)]


def test_broken_responses_lose_no_text() -> None:
    rng = random.Random(f"kimi{os.getpid() if IS_DEEP else ''}")
    for _ in range(10_000 if IS_DEEP else 30):
        broken = mutated(f"{THOUGHT}It is warm.{END}{ROME}{LAST}", rng)
        for has_tokens in (False, True):
            cuts = sorted(rng.randrange(len(broken) + 1) for _ in range(3))
            whole = KIMI.parts(broken, begun=THINKING, has_tokens=has_tokens)
            assert KIMI.parts(broken, *cuts, begun=THINKING, has_tokens=has_tokens) == whole
            KIMI.parts(broken, *cuts, begun=THINKING, is_guided=True, has_tokens=has_tokens)


@pytest.mark.parametrize("is_required", [False, True])
def test_the_grammar(is_required: bool) -> None:
    lark = KIMI.lark(ToolOffer(TOOLS, is_required=is_required))
    for text in (f"{THOUGHT}{END}{ROME}", f"{END}{kimi_k3(CALLS)}", f"{THOUGHT}{END}{ROME}<|close|>message<|sep|>"):
        assert KIMI.accepts(lark, text), text
    for text in (f"{THOUGHT}It is warm.{END}", "It is warm.", f"It is warm.{END}{ROME}"):
        assert KIMI.accepts(lark, text) is not is_required, text
    for text in (
        ROME,
        f"{END}{kimi_k3([('unknown', {})])}",
        f"{END}{kimi_k3([('get_weather', {'days': 3})])}",
        f"{END}{kimi_k3([('get_weather', {'city': 3})])}",
        f"{END}{kimi_k3([('mix-it_2', {'flag': True, 'kind': 'c'})])}",
    ):
        assert not KIMI.accepts(lark, text), text
    one = KIMI.lark(ToolOffer(TOOLS, is_parallel=False))
    assert KIMI.accepts(one, f"{END}{ROME}") and not KIMI.accepts(one, f"{END}{kimi_k3(CALLS)}")


def test_a_form_is_refused() -> None:
    for make in (KIMI.form_lark, lambda: KIMI.lark(ToolOffer(TOOLS, form="json"))):
        with pytest.raises(UnsupportedError, match="leave out the response format"):
            make()


def test_it_is_written_as_it_is_read() -> None:
    calls = [WrittenCall("get_weather", '{"city": "Rome\\n", "days": 3}'), WrittenCall("now", "{}")]
    assert KIMI.form.written(calls) == kimi_k3([("get_weather", {"city": "Rome\n", "days": 3}), ("now", {})])


def test_a_server() -> None:
    response = f"I look.<|close|>think<|sep|><|open|>response<|sep|>So:{END}{kimi_k3(CALL)}<|close|>message<|sep|>"
    assert parts_of(FamilyServer("Kimi-K3", response).message()) == ("I look.", "So:", CALL)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert parts_of(FamilyServer("Kimi-K3", f"Four.{END}").message(**off)) == (None, "Four.", [])
    assert encoder("Kimi-K3")[0].can_think_by_switch
    text = prompt("Kimi-K3", ASK, CALLED, result("c1", "windy"), tools=FUNCTIONS)
    assert f"{SPEAKING[len(HEAD) :]}{END}{kimi_k3([('get_weather', {'city': 'Rome'})])}{LAST}" in text
    assert f'tool="get_weather"<|sep|>windy{LAST}' in text and text.endswith(THINKING)
