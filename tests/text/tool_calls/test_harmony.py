"""Harmony: thoughts, text and calls in channels, wherever the text is cut; its grammar accepts what it reads."""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewick.outputs import PartDelta
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import Grammar, grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import make_small_vocabulary
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named, format_of
from pagewick.text.tool_calls.offer import ToolOffer
from tests.deep import IS_DEEP
from tests.text.tool_calls.families import OFFER, TOOLS, AllTokens, NoTokens
from tests.text.tool_calls.test_formats import mutated

WORDS = format_named("openai").words
THOUGHT = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich"}'
OTHER = CALLED.replace("get_weather", "python")
ANSWER = "<|channel|>final<|message|>It is warm."


def parts_of(text: str, *cuts: int, offer: ToolOffer | None = OFFER, is_guided: bool = False) -> list[tuple[str, str]]:
    """The parts of a response, those of one kind in a row joined; a call begins with its name."""
    form = format_named("harmony")
    tokenizer: Any = AllTokens(form.words)
    splitting = ToolCallFormat(form, tokenizer).splitting([], offer, is_guided=is_guided)
    assert splitting is not None
    splitter = splitting.splitter()
    for mark, word in zip(splitter.marks.values(), form.words, strict=True):
        text = text.replace(word, mark)
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANSWER, [("text", "It is warm.")]),
        (THOUGHT + ANSWER + "<|return|>", [("reasoning", "Hm {"), ("text", "It is warm.")]),
        (THOUGHT + SAID + CALLED + "<|call|>",
         [("reasoning", "Hm {"), ("text", "I look."), ("get_weather", '{"city": "Zürich"}')]),
        (OTHER, [("text", '{"city": "Zürich"}')]),
        (CALLED.replace("}", ""), [("text", '{"city": "Zürich"')]),
        ("No channel.", [("text", "No channel.")]),
        ("Hm. " + ANSWER, [("text", "Hm. It is warm.")]),
        ("Hm. " + CALLED, [("text", "Hm. "), ("get_weather", '{"city": "Zürich"}')]),
        ("Hm.<|channel|>", [("text", "Hm.")]),
        ("Hm.<|message|>It is warm.", [("text", "Hm.It is warm.")]),
        (ANSWER + "<|end|>\nMore." + THOUGHT, [("text", "It is warm.\nMore."), ("reasoning", "Hm {")]),
        (" to=functions.now<|channel|>commentary<|message|>{}", [("now", "{}")]),
        (ANSWER + "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}",
         [("text", "It is warm."), ("now", "{}")]),
        ("<|channel|>fin", []),
    ],
)  # fmt: skip
def test_parts_wherever_the_text_is_cut(text: str, expected: list[tuple[str, str]]) -> None:
    assert parts_of(text) == expected
    for cut in range(len(text)):
        assert parts_of(text, cut) == expected
    if expected and expected[-1][0] == "get_weather":
        assert parts_of(text, *range(len(text)), is_guided=True) == expected


def test_broken_responses_lose_no_text() -> None:
    """Only headers are left out: what precedes their first mark is text, unless it is a role and a recipient."""
    rng = random.Random(f"harmony{os.getpid() if IS_DEEP else ''}")
    form, tokenizer = format_named("openai"), AllTokens(WORDS)
    splitting = ToolCallFormat(form, cast("Any", tokenizer)).splitting([], OFFER)
    assert splitting is not None
    marks = splitting.splitter().marks
    for _ in range(10_000 if IS_DEEP else 50):
        text = f"{THOUGHT}{SAID}{CALLED}<|call|><|start|>assistant{ANSWER}"
        for mark, word in zip(marks.values(), form.words, strict=True):
            text = text.replace(word, mark)
        broken = mutated(text, rng)
        cuts = sorted(rng.randrange(len(broken) + 1) for _ in range(3))
        whole = parts_of(broken)
        assert parts_of(broken, *cuts) == whole
        parts_of(broken, *cuts, is_guided=True)
        (lead, *_) = re.split(f"[{''.join(marks.values())}]", broken)
        if not re.fullmatch(r"(assistant)?\s*(to=[\w.-]+)?\s*", lead):
            assert whole[0][0] == "text" and whole[0][1].startswith(lead)


def test_channels_are_separated_without_tools() -> None:
    assert parts_of(THOUGHT + ANSWER, offer=None) == [("reasoning", "Hm {"), ("text", "It is warm.")]
    assert parts_of(CALLED, offer=None) == [("text", json.dumps({"city": "Zürich"}, ensure_ascii=False))]


def test_one_call_where_one_is_allowed() -> None:
    text = f"{CALLED}<|call|><|start|>assistant{CALLED}"
    assert parts_of(text, offer=ToolOffer(TOOLS, is_parallel=False))[1][0] == "text"


@pytest.mark.parametrize("is_required", [False, True])
def test_the_grammar(is_required: bool) -> None:
    nothing: Any = NoTokens()
    form = ToolCallFormat(format_named("openai"), nothing)
    # Without the tokens, a text would hide the marks behind it; a call alone has none.
    lark = form.grammar(ToolOffer(TOOLS, is_required=is_required), GrammarLimits())
    vocabulary = LLTokenizer("byte")
    made = LLMatcher(vocabulary, lark)
    assert not made.is_error(), made.get_error()
    token_ids = vocabulary.tokenize_str(CALLED)
    assert made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()
    other = vocabulary.tokenize_str(OTHER)
    assert LLMatcher(vocabulary, lark).try_consume_tokens(other) < len(other)


def test_a_form_without_tools_stands_in_the_final_message() -> None:
    form, tokenizer = format_named("openai"), AllTokens(WORDS)
    lark = ToolCallFormat(form, cast("Any", tokenizer)).form_grammar(GrammarLimits())
    assert lark is not None
    answer = grammar_of(StructuredOutputsParams(choice=("yes", "no")), GrammarLimits())
    special = {tokenizer.id_of(word): word.encode() for word in WORDS}
    vocabulary = make_small_vocabulary(special, max(special) + 1)
    grammar = whole_grammar(Grammar(lark, answer=answer), None)

    def is_accepted(text: str) -> bool:
        pieces = re.split("({})".format("|".join(map(re.escape, WORDS))), text)
        spelled = [[tokenizer.id_of(one)] if one in WORDS else vocabulary.tokenize_str(one) for one in pieces]
        token_ids = [token_id for part in spelled for token_id in part]
        made = LLMatcher(vocabulary, grammar)
        assert not made.is_error(), made.get_error()
        return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()

    final = "<|channel|>final<|message|>yes"
    assert is_accepted(final) and is_accepted(THOUGHT + final) and is_accepted(THOUGHT + THOUGHT + final)
    assert parts_of(THOUGHT + final + "<|return|>", offer=None)[-1] == ("text", "yes")
    for text in ("yes", final.replace("final", "analysis"), SAID + final, ANSWER, CALLED):
        assert not is_accepted(text)


def test_it_is_found() -> None:
    assert format_of(["... <|start|>assistant<|channel|>final<|message|> ..."]).name == "openai"
