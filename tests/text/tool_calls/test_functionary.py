"""Functionary v3.2: texts and calls behind their recipients, wherever the response is cut; its grammar."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewick.outputs import PartDelta
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import Grammar, grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named, format_of
from pagewick.text.tool_calls.offer import ToolOffer
from tests.deep import IS_DEEP
from tests.text.tool_calls.families import CALLS, OFFER, TOOLS, NoTokens
from tests.text.tool_calls.later_forms import functionary_31, functionary_32
from tests.text.tool_calls.test_formats import mutated
from tests.text.tool_calls.test_newer_families import CALL, FamilyServer, parts_of
from tests.text.tool_calls.test_prompts_with_tools import ASK, CALLED, prompt, result

TOKENIZER: Any = NoTokens()
FORM = ToolCallFormat(format_named("functionary_v32"), TOKENIZER)
VOCABULARY = LLTokenizer("byte")
ROME = functionary_32([("get_weather", {"city": "Zürich"})])
WEATHER, NOW = ("get_weather", '{"city": "Zürich"}'), ("now", "{}")


def split(text: str, *cuts: int, offer: ToolOffer | None = OFFER, is_guided: bool = False) -> list[tuple[str, str]]:
    """The parts of a response, those of one kind in a row joined; a call begins with its name."""
    splitting = FORM.splitting([], offer, is_guided=is_guided)
    assert splitting is not None
    splitter, ends = splitting.splitter(), [*cuts, len(text)]
    runs = [run for a, b in zip([0, *ends], ends, strict=False) for run in splitter.feed(text[a:b])]
    runs += splitter.flush()
    assert "".join(run[1] for run in runs if isinstance(run, tuple)) == text
    parts: list[tuple[str, str]] = []
    for run in runs:
        kind, piece = (run.call.name, run.text) if isinstance(run, PartDelta) and run.call else run  # type: ignore[misc]
        if parts and parts[-1][0] == kind:
            parts[-1] = kind, parts[-1][1] + piece
        elif kind != "dropped":
            parts.append((kind, piece))
    return parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all\nFour.", [("text", "Four.")]),
        (ROME, [WEATHER]),
        (f">>>{ROME}", [WEATHER]),
        (f"{ROME}>>>now\n{{}}", [WEATHER, NOW]),
        (f"all\nI look.>>>{ROME}\n>>>now\n{{}}", [("text", "I look."), WEATHER, NOW]),
        (f"{ROME}>>>all\nI have looked.", [WEATHER, ("text", "I have looked.")]),
        ("all\n>>> print(1)\n1\n>>>", [("text", ">>> print(1)\n1\n>>>")]),
        ("all\nA.>>>all\nB.", [("text", "A.B.")]),
        ("python\nprint(1)", [("text", "python\nprint(1)")]),
        ("all\nget_weather\n{}", [("text", "get_weather\n{}")]),
        ("alles", [("text", "alles")]),
        ("al", [("text", "al")]),
        ("all\n", []),
        ("", []),
    ],
)
def test_parts_wherever_the_text_is_cut(text: str, expected: list[tuple[str, str]]) -> None:
    for is_guided in (False, True):
        assert split(text, is_guided=is_guided) == expected
        for cut in range(len(text)):
            assert split(text, cut, is_guided=is_guided) == expected
        assert split(text, *range(1, len(text)), is_guided=is_guided) == expected
    if not text.startswith(ROME[:3]) and "get_weather" not in text:
        assert split(text, offer=None) == expected


def test_several_calls_and_one_where_one_is_allowed() -> None:
    text = functionary_32(CALLS)
    assert [name for name, _ in split(text)] == ["get_weather", "now", "mix-it_2"]  # the last twice
    alone = split(text, offer=ToolOffer(TOOLS, is_parallel=False))
    assert alone[0][0] == "get_weather" and {kind for kind, _ in alone[1:]} == {"text"}


def test_broken_responses_lose_no_text() -> None:
    rng = random.Random(f"functionary{os.getpid() if IS_DEEP else ''}")
    for _ in range(10_000 if IS_DEEP else 50):
        broken = mutated(f"all\nI look.>>>{ROME}>>>now\n{{}}>>>all\nSo.", rng)
        cuts = sorted(rng.randrange(len(broken) + 1) for _ in range(3))
        assert split(broken, *cuts) == split(broken)
        split(broken, *cuts, is_guided=True)


def is_accepted(lark: str, text: str, answer: Grammar | None = None) -> bool:
    made = LLMatcher(VOCABULARY, whole_grammar(Grammar(lark, answer=answer), None))
    assert not made.is_error(), made.get_error()
    token_ids = VOCABULARY.tokenize_str(text)
    return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()


@pytest.mark.parametrize("is_required", [False, True])
def test_the_grammar(is_required: bool) -> None:
    lark = FORM.grammar(ToolOffer(TOOLS, is_required=is_required), GrammarLimits())
    assert is_accepted(lark, ROME) and is_accepted(lark, functionary_32(CALLS))
    for text in (
        "all\n",
        "all\nFour.",
        "all\n>>> print()\n>>>f\n>>>",
        f"all\nI look.>>>{ROME}",
        f"all\nA>>>now\n{{}}>>>{ROME}",
    ):
        assert is_accepted(lark, text) is not is_required, text
    for text in (
        "Four.",
        functionary_32([("unknown", {})]),
        functionary_32([("get_weather", {"days": 3})]),
        'all\nI look.>>>get_weather\n{"days": 3}',
        "all\nA>>>now\n{}B",
    ):
        assert not is_accepted(lark, text), text
    one = FORM.grammar(ToolOffer(TOOLS, is_parallel=False), GrammarLimits())
    assert is_accepted(one, ROME) and not is_accepted(one, functionary_32(CALLS))
    assert not is_accepted(one, f"all\nA>>>now\n{{}}>>>{ROME}")


def test_a_form_stands_in_the_text() -> None:
    answer = grammar_of(StructuredOutputsParams(choice=("yes", "no")), GrammarLimits())
    alone = FORM.form_grammar(GrammarLimits())
    beside = FORM.grammar(ToolOffer(TOOLS, form="text"), GrammarLimits())
    assert alone is not None
    for lark in (alone, beside):
        assert is_accepted(lark, "all\nyes", answer)
        for text in ("yes", "all\nmaybe", f"all\nyes>>>{ROME}"):
            assert not is_accepted(lark, text, answer)
    assert is_accepted(beside, ROME, answer) and not is_accepted(alone, ROME, answer)
    for text in ("all\nnow\n{}", 'all\n{"a": ">>>now"}'):
        assert split(text, offer=ToolOffer(TOOLS, form="json")) == [("text", text.removeprefix("all\n"))]


def test_both_versions_through_the_server() -> None:
    assert parts_of(FamilyServer("Functionary-v3.2", f"all\nSo:>>>{functionary_32(CALL)}").message()) == (
        None,
        "So:",
        CALL,
    )
    assert parts_of(FamilyServer("Functionary-v3.2", "all\nFour.").message(tools=[])) == (None, "Four.", [])
    assert parts_of(FamilyServer("Functionary-v3.1", f"So:{functionary_31(CALL)}").message()) == (None, "So:", CALL)
    for name, written in (("Functionary-v3.2", ">>>get_weather\n"), ("Functionary-v3.1", "<function=get_weather>")):
        text = prompt(name, ASK, CALLED, result("c1", "windy"))
        assert f'{written}{{"city": "Rome"}}' in text and "windy<|eot_id|>" in text


def test_the_format_of_a_template() -> None:
    llama = "<|start_header_id|>ipython<|end_header_id|>"
    assert format_of([f"{llama} ... <function=example_function_name>"]).name == "functionary_v31"
    assert format_of([f"{llama} ... >>>all\\n"]).name == "functionary_v32"
    assert format_of([f"{llama} ... <function=f>\n<parameter=a>"]).name == "qwen3_coder"
