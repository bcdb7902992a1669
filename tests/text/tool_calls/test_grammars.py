"""Each format's grammar accepts calls as the family writes them, and its reader reads all that the grammar allows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagewick.errors import InvalidRequestError
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.grammar import Grammar, whole_grammar
from pagewick.text.grammars.grammar import grammar_of as form_grammar_of
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import make_small_vocabulary
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from tests.text.tool_calls.families import CALLS, FAMILIES, TOOLS, AllTokens, Family, format_with, tool
from tests.text.tool_calls.test_formats import read

VOCABULARY = LLTokenizer("byte")
# Not every form that a family's models have written is one that the grammar lets them write.
OTHER_FORMS = {"hermes_2", "llama_tag", "phi_4_functools", "gemma_3_printed", "granite_tag", "command_r", "command_r7b",
               "llama_4", "glm_47", "olmo_3_python", "plain_list", "fenced_list", "mistral", "lfm_2_python",
               "lfm_2_objects", "nemotron_parameters", "hunyuan_lines", "apriel", "internlm_arguments",
               "minicpm_5_lines", "seed_oss_python", "minicpm_5_python"}  # fmt: skip
WRITTEN = {family.parser: family for family in FAMILIES if family.name not in OTHER_FORMS}
# There, nested values are written as JSON.
IN_PYTHON = ("pythonic", "gemma3", "smollm3_code", "lfm2")
each_format = pytest.mark.parametrize("name", WRITTEN)


def grammar_of(family: Family, offer: ToolOffer) -> str:
    return format_with(family, has_tokens=False).grammar(offer, GrammarLimits())


def matcher(family: Family, offer: ToolOffer) -> LLMatcher:
    made = LLMatcher(VOCABULARY, grammar_of(family, offer))
    assert not made.is_error(), made.get_error()
    return made


def accepts(family: Family, offer: ToolOffer, text: str) -> bool:
    made = matcher(family, offer)
    token_ids = VOCABULARY.tokenize_str(text)
    return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()


@each_format
@pytest.mark.parametrize("is_required", [False, True])
def test_calls_in_the_familys_form_are_accepted(name: str, is_required: bool) -> None:
    family = WRITTEN[name]
    offer = ToolOffer(TOOLS, is_required=is_required)
    calls = CALLS[:2] if name in IN_PYTHON else CALLS[: family.max_calls]
    text = family.write(calls)
    assert accepts(family, offer, text)
    if is_required or name not in ("glm4", "pythonic"):  # there, the name of another tool is text
        assert not accepts(family, offer, family.write([("unknown", {})]))
    assert not accepts(family, offer, family.write([("get_weather", {"days": 3})]))
    assert not accepts(family, offer, text[:-1])
    assert accepts(family, offer, "No call here: { [ <t") is not is_required
    if not family.is_bare:
        assert accepts(family, offer, "I look.\n" + text) is not is_required


@each_format
@pytest.mark.parametrize("is_required", [False, True])
def test_markers_that_are_tokens(name: str, is_required: bool) -> None:
    """Only the tokens count then, and not their letters."""
    family = WRITTEN[name]
    words = [
        word
        for word in format_with(family, has_tokens=False).form.words
        if re.fullmatch(r"[<\[\]]\S+[>\]\[]|<[a-z]+", word)
    ]
    tokenizer: Any = AllTokens(words)
    ids = {word: tokenizer.id_of(word) for word in words}
    vocabulary = make_small_vocabulary({token_id: word.encode() for word, token_id in ids.items()}, 200)
    offer = ToolOffer(TOOLS, is_required=is_required)
    grammar = ToolCallFormat(format_named(family.parser), tokenizer).grammar(offer, GrammarLimits())
    text = "I look." * (not is_required and not family.is_bare)
    text += family.write(CALLS[:2] if name in IN_PYTHON else CALLS[: family.max_calls])
    for are_tokens in (True, False) if words else (True,):
        made = LLMatcher(vocabulary, grammar)
        assert not made.is_error(), made.get_error()
        token_ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]:
            token_ids += [ids[part]] if part in words and are_tokens else [200 + byte for byte in part.encode()]
        num_taken = made.try_consume_tokens(token_ids)
        is_accepted = num_taken == len(token_ids) and made.is_accepting()
        is_free = not is_required and not family.is_bare  # letters are text
        assert is_accepted is (are_tokens or is_free or not any(word in text for word in words))


@each_format
def test_one_call_where_one_is_allowed(name: str) -> None:
    family = WRITTEN[name]
    offer = ToolOffer(TOOLS, is_parallel=False)
    assert accepts(family, offer, family.write(CALLS[:1]))
    if family.max_calls > 1:
        assert not accepts(family, offer, family.write(CALLS[:2]))


@each_format
def test_random_responses_are_calls(name: str) -> None:
    """Every response that the grammar forces is read as calls of these tools, with their arguments."""
    family, rng = WRITTEN[name], random.Random(name)
    go = tool("go", {"n": {"type": "integer"}, "to": {"enum": ["a", "é b"]}, "on": {"type": "boolean"}}, ["n"])
    offer = ToolOffer([tool("now", {}), go], is_required=True)
    for _ in range(4):
        made, text = matcher(family, offer), bytearray()
        while not made.is_accepting() and len(text) < 1000:
            allowed = [place for place, bit in enumerate(_bits(made)) if bit and place < 256]
            chosen = rng.choice(allowed)
            made.consume_token(chosen)
            text.append(chosen)
        found = read(family, text.decode(errors="replace"), offer=offer, is_guided=True)
        assert found.calls and found.shown == ""
        for called, arguments in found.parsed:
            assert called in offer.by_name and arguments.keys() <= offer.by_name[called].properties.keys()


def _bits(made: LLMatcher) -> Sequence[int]:
    return [byte >> place & 1 for byte in made.compute_bitmask() for place in range(8)]


@each_format
def test_required_arguments_and_their_schemas(name: str) -> None:
    family = WRITTEN[name]
    offer = ToolOffer(TOOLS, is_required=True)
    assert not accepts(family, offer, family.write([("get_weather", {"city": "x", "days": "three"})]))
    assert not accepts(family, offer, family.write([("mix-it_2", {"flag": True, "kind": "c"})]))
    assert not accepts(family, offer, family.write([("now", {"when": 1})]))


def test_strict_tools_are_kept_exactly_or_refused() -> None:
    unique = {"type": "array", "uniqueItems": True}
    lenient, strict = (Tool("f", {"type": "object", "properties": {"a": unique}}, one) for one in (False, True))
    assert accepts(WRITTEN["hermes"], ToolOffer([lenient]), WRITTEN["hermes"].write([("f", {"a": [1, 1]})]))
    made = LLMatcher(VOCABULARY, grammar_of(WRITTEN["hermes"], ToolOffer([strict])))
    assert made.is_error() and "uniqueItems" in made.get_error()
    coded = tool("f", {"a": {"type": "string", "pattern": "^x+$"}}, is_strict=True)
    with pytest.raises(InvalidRequestError, match="'pattern' cannot be kept"):
        grammar_of(WRITTEN["qwen3_coder"], ToolOffer([coded]))
    assert accepts(WRITTEN["hermes"], ToolOffer([coded]), WRITTEN["hermes"].write([("f", {"a": "xx"})]))
    assert not accepts(WRITTEN["hermes"], ToolOffer([coded]), WRITTEN["hermes"].write([("f", {"a": "y"})]))


def test_a_schema_beyond_the_limits_is_refused() -> None:
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequestError, match="deeper than 64 levels"):
        grammar_of(WRITTEN["hermes"], ToolOffer([tool("f", {"a": deep})]))


# Calls of some formats are JSON, too. This schema is closed, so it excludes them.
ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["name"],
    "additionalProperties": False,
}


def is_accepted(grammar: Grammar, text: str) -> bool:
    made = LLMatcher(VOCABULARY, whole_grammar(grammar, None))
    assert not made.is_error(), made.get_error()
    token_ids = VOCABULARY.tokenize_str(text)
    return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()


def beside_form(name: str, **form: Any) -> Grammar:
    """Return the grammar of responses that are calls or have a form."""
    params = StructuredOutputsParams(**form)
    offer = ToolOffer(TOOLS, form="json" if params.is_json else "text")
    spacing = format_with(WRITTEN[name], has_tokens=False).json_spacing
    answer = form_grammar_of(params, GrammarLimits(), spacing)
    return Grammar(grammar_of(WRITTEN[name], offer), answer=answer)


@each_format
def test_a_response_with_a_form_is_either_calls_or_has_the_form(name: str) -> None:
    family = WRITTEN[name]
    accepted = partial(is_accepted, beside_form(name, json=ANSWER))
    calls = family.write(CALLS[: 2 if name in IN_PYTHON else family.max_calls])
    assert accepted(calls)
    assert not accepted("I look.\n" + calls) and not accepted("No call here.")
    assert not accepted(family.write([("unknown", {})]))
    assert accepted('{"name": "get_weather"}') and not accepted('{"name": 3}')
    assert accepted('{"name": "x", "tags": ["a", "b"]}') and accepted('{"name": "now", "tags": []}')


@each_format
def test_the_text_of_a_form_stays_text(name: str) -> None:
    """Markers and calls within the text are no calls, wherever it is cut; one at its beginning is."""
    family = WRITTEN[name]
    offer = ToolOffer(TOOLS, form="json")
    words = "".join(format_with(family, has_tokens=False).form.words)
    for text in ('{"name": "x"}', "[1]", json.dumps({"a": family.write(CALLS[:1]), "b": words}, ensure_ascii=False)):
        for cut in range(len(text)):
            found = read(family, text, cut, offer=offer, is_guided=True)
            assert found.shown == text and not found.calls
    text = family.write(CALLS[:1])
    for cut in range(len(text)):
        assert read(family, text, cut, offer=offer, is_guided=True).parsed == CALLS[:1]


@pytest.mark.parametrize("name", ["llama3_json", "json"])
def test_calls_without_a_marker_beside_texts_and_other_json(name: str) -> None:
    calls = WRITTEN[name].write(CALLS[:1])
    for form, fits, differs in (
        ({"regex": r'\{"[a-z]+": [0-9]+\}|yes'}, ('{"name": 3}', "yes"), "no"),
        ({"choice": ['{"name": "nobody"}', "x"]}, ('{"name": "nobody"}', "x"), '{"name": "x"}'),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, ("[1, 2]", "[]"), "[true]"),
        ({"json_object": True}, ("{}", '{"a": {"b": [1, {}]}}'), "[1]"),
    ):
        accepted = partial(is_accepted, beside_form(name, **form))
        assert accepted(calls) and all(map(accepted, fits)) and not accepted(differs)


@pytest.mark.parametrize("name", ["llama3_json", "json"])
def test_no_call_without_a_marker_evades_the_grammar(name: str) -> None:
    """With an optional call, all that would be read as a call is one that the grammar guides."""
    family, offer = WRITTEN[name], ToolOffer(TOOLS)
    right, wrong = (f'{{"city": "Rome", "days": {days}}}' for days in ("3", '"three"'))
    fitting, other = (f'{{"type": "function", "name": "get_weather", "parameters": {one}}}' for one in (right, wrong))
    for is_required in (False, True):
        asked = ToolOffer(TOOLS, is_required=is_required)
        assert accepts(family, asked, fitting) and not accepts(family, asked, other)
    assert read(family, fitting, offer=offer, is_guided=True).parsed == [("get_weather", json.loads(right))]
    for unguided in (
        other,
        f'{{"parameters": {wrong}, "name": "get_weather"}}',
        f'{{"id": ["}}", {{"a": {{}}}}], "name" : "get_weather", "arguments": {wrong}}}',
        f'[{{"id": "a\\"}}", "name": "get_weather", "arguments": {wrong}}}]',
        f'```json\n{{"name": "get_weather", "parameters": {wrong}}}\n```',
    ):
        is_read = bool(read(family, unguided, offer=offer, is_guided=True).calls)
        assert is_read or not unguided.startswith("{")
        assert not (is_read and accepts(family, offer, unguided)), unguided
    for text in (
        '{"result": {"name": "now"}}',
        '{"type": "function", "function": {"name": "now", "parameters": {}}}',
        '{"is": "\\"name\\": \\"now\\""} and {"name": "now"}',
        '{"type": "function", "name": "other", "parameters": {}}',
    ):
        assert accepts(family, offer, text) and read(family, text, offer=offer, is_guided=True).shown == text


def test_calls_without_a_marker_decide_the_white_space_of_json() -> None:
    assert not is_accepted(beside_form("llama3_json", json=ANSWER), '{ "name" : "x"}')
    for option in ({"disable_any_whitespace": True}, {"whitespace_pattern": " *"}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(option))} cannot be combined with tools here"):
            beside_form("llama3_json", json=ANSWER, **option)
        assert is_accepted(beside_form("hermes", json=ANSWER, **option), '{"name":"x"}')


def test_a_form_without_tools_stands_alone() -> None:
    assert format_with(WRITTEN["hermes"], has_tokens=True).form_grammar(GrammarLimits()) is None


@each_format
def test_a_form_must_not_allow_the_beginning_of_a_call(name: str) -> None:
    """For every format whose marker is no token, the beginnings name all calls that the grammar writes."""
    family = WRITTEN[name]
    offer = ToolOffer(TOOLS, form="json")
    for has_tokens in (False, True):
        found = format_with(family, has_tokens=has_tokens)
        is_marked = (
            has_tokens and set(found.form.openers) & set(found.form.words) and not found.form.exact_starts(offer)
        )
        begins = family.write(CALLS[:1]).startswith(found.beginnings(offer))
        assert begins is not bool(is_marked)
