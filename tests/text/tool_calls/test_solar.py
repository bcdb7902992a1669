"""Solar Open: thoughts, text and calls in messages, wherever the text is cut; its grammar accepts what it reads."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from pagewick.outputs import PartDelta
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import Grammar, grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import make_small_vocabulary
from pagewick.text.reasoning import ReasoningTags
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named, format_of
from pagewick.text.tool_calls.offer import ToolOffer
from pagewick.text.tool_calls.solar import ten_characters
from pagewick.text.tool_calls.written import WrittenCall
from tests.deep import IS_DEEP
from tests.text.tool_calls.families import CALLS, OFFER, TOOLS, AllTokens, NoTokens
from tests.text.tool_calls.forms import solar
from tests.text.tool_calls.test_formats import mutated
from tests.tiny_text import byte_level_backend

FORM = format_named("solar_open")
NEXT = "<|end|><|begin|>assistant"
THOUGHT = f"<|think|>Hm {{<{NEXT}"
ANSWER = "<|content|>It is warm."
CALLED = solar([("get_weather", {"city": "Zürich"})])
WEATHER = ("get_weather", '{"city": "Zürich"}')
TOKENIZER: Any = AllTokens(FORM.words)


def parts_of(
    text: str, *cuts: int, offer: ToolOffer | None = OFFER, is_guided: bool = False, has_tokens: bool = True
) -> list[tuple[str, str]]:
    """The parts of a response, those of one kind in a row joined; a call begins with its name."""
    tokenizer: Any = TOKENIZER if has_tokens else NoTokens()
    splitting = ToolCallFormat(FORM, tokenizer).splitting([], offer, is_guided=is_guided)
    assert splitting is not None
    splitter = splitting.splitter()
    for token_id, mark in splitter.marks.items():
        text = text.replace(FORM.words[token_id - 100], mark)
    ends = [*cuts, len(text)]
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


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANSWER, [("text", "It is warm.")]),
        (f"{THOUGHT}{ANSWER}<|flush|>", [("reasoning", "Hm {<"), ("text", "It is warm.")]),
        (f"{THOUGHT}{CALLED}<|calls|>", [("reasoning", "Hm {<"), WEATHER]),
        (f"{THOUGHT}<|content|>I look.{NEXT}{CALLED}", [("reasoning", "Hm {<"), ("text", "I look."), WEATHER]),
        (CALLED, [WEATHER]),
        (CALLED.replace("a1b2c3d4e0", ""), [WEATHER]),
        (f"<|begin|>assistant{CALLED}", [WEATHER]),
        ("<|think|>Hm", [("reasoning", "Hm")]),
        (f"<|think|>Hm{NEXT}<|content|>", [("reasoning", "Hm")]),
        ("<|think|>Hm<|end|>so<|begin|>assistant<|content|>Hi", [("reasoning", "Hm"), ("text", "soHi")]),
        ("No message.", [("text", "No message.")]),
        ("assistants help.", [("text", "assistants help.")]),
        ("assist", [("text", "assist")]),
        (f"{' ' * 60}x", [("text", f"{' ' * 60}x")]),
        (f"{' ' * 60}{ANSWER}", [("text", f"{' ' * 60}It is warm.")]),
        (f"\n{ANSWER}", [("text", "It is warm.")]),
        ("<|content|>", []),
        ("", []),
    ],
)
def test_parts_wherever_the_text_is_cut(text: str, expected: list[tuple[str, str]], has_tokens: bool) -> None:
    assert parts_of(text, has_tokens=has_tokens) == expected
    for cut in range(len(text)):
        assert parts_of(text, cut, has_tokens=has_tokens) == expected
    if expected[-1:] == [WEATHER]:
        assert parts_of(text, *range(len(text)), is_guided=True, has_tokens=has_tokens) == expected


def test_several_calls_and_one_where_one_is_allowed() -> None:
    text = solar(CALLS)
    assert [name for name, _ in parts_of(text)] == ["get_weather", "now", "mix-it_2"]  # the last twice
    alone = parts_of(text, offer=ToolOffer(TOOLS, is_parallel=False))
    assert alone[0][0] == "get_weather" and {kind for kind, _ in alone[1:]} == {"text"}


def test_broken_responses_lose_no_text() -> None:
    rng = random.Random(f"solar{os.getpid() if IS_DEEP else ''}")
    for _ in range(10_000 if IS_DEEP else 50):
        broken = mutated(f"{THOUGHT}<|content|>I look.{NEXT}{CALLED}<|calls|>", rng)
        for has_tokens in (False, True):
            cuts = sorted(rng.randrange(len(broken) + 1) for _ in range(3))
            whole = parts_of(broken, has_tokens=has_tokens)
            assert parts_of(broken, *cuts, has_tokens=has_tokens) == whole
            parts_of(broken, *cuts, is_guided=True, has_tokens=has_tokens)


def test_messages_are_separated_without_tools() -> None:
    assert parts_of(THOUGHT + ANSWER, offer=None) == [("reasoning", "Hm {<"), ("text", "It is warm.")]


def is_accepted(lark: str, text: str, answer: Grammar | None = None) -> bool:
    special = {TOKENIZER.id_of(word): word.encode() for word in FORM.words}
    vocabulary = make_small_vocabulary(special, max(special) + 1)
    pieces = re.split("({})".format("|".join(map(re.escape, FORM.words))), text)
    spelled = [[TOKENIZER.id_of(one)] if one in FORM.words else vocabulary.tokenize_str(one) for one in pieces]
    token_ids = [token_id for part in spelled for token_id in part]
    made = LLMatcher(vocabulary, whole_grammar(Grammar(lark, answer=answer), None))
    assert not made.is_error(), made.get_error()
    return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()


@pytest.mark.parametrize("is_required", [False, True])
def test_the_grammar(is_required: bool) -> None:
    lark = ToolCallFormat(FORM, TOKENIZER).grammar(ToolOffer(TOOLS, is_required=is_required), GrammarLimits())
    for text in (CALLED, solar(CALLS), THOUGHT + CALLED, f"{THOUGHT}<|content|>I look.{NEXT}{CALLED}"):
        assert is_accepted(lark, text)
    for text in (ANSWER, THOUGHT + ANSWER):
        assert is_accepted(lark, text) is not is_required
    for text in (
        "It is warm.",
        THOUGHT,
        THOUGHT + THOUGHT + CALLED,
        solar([("unknown", {})]),
        solar([("get_weather", {"days": 3})]),
        CALLED.replace("a1b2c3d4e0", "A"),
        f"{CALLED}<|calls|>",  # it ends the response
    ):
        assert not is_accepted(lark, text)
    one = ToolCallFormat(FORM, TOKENIZER).grammar(ToolOffer(TOOLS, is_parallel=False), GrammarLimits())
    assert is_accepted(one, CALLED) and not is_accepted(one, solar(CALLS))


def test_a_form_stands_in_the_text() -> None:
    form = ToolCallFormat(FORM, TOKENIZER)
    answer = grammar_of(StructuredOutputsParams(choice=("yes", "no")), GrammarLimits())
    alone = form.form_grammar(GrammarLimits())
    beside = form.grammar(ToolOffer(TOOLS, form="text"), GrammarLimits())
    assert alone is not None
    for lark in (alone, beside):
        assert is_accepted(lark, "<|content|>yes", answer) and is_accepted(lark, f"{THOUGHT}<|content|>no", answer)
        for text in ("yes", "<|content|>maybe", f"<|content|>I look.{NEXT}<|content|>yes"):
            assert not is_accepted(lark, text, answer)
    assert is_accepted(beside, THOUGHT + CALLED, answer) and not is_accepted(alone, CALLED, answer)


def test_it_is_found_and_has_no_tags() -> None:
    source = "<|begin|>assistant<|think|> ... <|tool_calls|><|tool_call:begin|>"
    assert format_of([source]).name == "solar_open"
    backend = byte_level_backend()
    backend.add_tokens([*FORM.words])
    assert ReasoningTags.find(Tokenizer(backend, config={}), [source]) is None


def test_ids_in_prompts_have_the_models_form() -> None:
    assert ten_characters("a1b2c3d4e5", "f", 0) == "a1b2c3d4e5"
    made = ten_characters("call_ABC", "f", 0)
    assert re.fullmatch("[a-z0-9]{10}", made) and made == ten_characters("call_ABC", "g", 1)
    lark = ToolCallFormat(FORM, TOKENIZER).grammar(OFFER, GrammarLimits())
    assert is_accepted(lark, FORM.written([WrittenCall("now", "{}"), WrittenCall("now", "{}")]))
