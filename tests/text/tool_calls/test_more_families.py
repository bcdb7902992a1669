"""Hunyuan, Apriel, Apertus, InternLM, Nemotron-4, xLAM, EXAONE, Trinity: their templates, and what models write."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from pagewick.outputs import PartDelta, PartKind
from pagewick.text.grammars.grammar import Grammar, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.grammars.vocabulary import make_vocabulary
from pagewick.text.part_splitter import joined
from pagewick.text.reasoning import Reasoning, Stage
from pagewick.text.tool_calls.formats import format_named, format_of
from tests.text.tool_calls.families import CALLS, OFFER
from tests.text.tool_calls.forms import nemotron_4
from tests.text.tool_calls.test_formats import BY_FAMILY, read
from tests.text.tool_calls.test_grammars import accepts
from tests.text.tool_calls.test_prompts_with_tools import ASK, CALLED, TOOLS, encoder, prompt, result

APERTUS, FENCED, LISTED, INTERNLM, HERMES, XLAM = (
    BY_FAMILY[name] for name in ("apertus", "hunyuan", "hunyuan_list", "internlm", "hermes", "xlam")
)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("first print <tool_calls> ... <tool_call>function_name\n```json\n...\n```</tool_call>", "hunyuan_fenced"),
        ('<|extra_0|> ... <tool_calls>[{"name": "func_name1", "arguments": ...}]</tool_calls>', "hunyuan_a13b"),
        (
            'within <tool_call></tool_call> XML tags ... <tool_calls>[{"name": <function-name-1>',
            "hunyuan_a13b",
        ),  # Apriel
        ("{%- set tool_calls_token = '<|tools_prefix|>' -%}", "apertus"),
        ("<|im_start|>assistant ... <|action_start|><|plugin|>", "internlm"),
        ("'<extra_id_0>System' ... '\\n<tool> ' + tool | tojson + ' </tool>' ... <extra_id_1>Tool", "nemotron4"),
        ("<|start_header_id|> ... make calls in a single JSON array: ... <|eot_id|>", "xlam"),
        ("<|tool_declare|> ... <tool_call> ... <tool_result>", "hermes"),  # K-EXAONE
        ("<|im_start|>system ... <tool_call>\n", "hermes"),  # Trinity Mini
        ("<|im_start|> <tool_call>\n<function=f>\n<parameter=a>\n", "qwen3_coder"),  # Trinity Large Thinking
    ],
)
def test_the_format_of_a_template(source: str, name: str) -> None:
    assert format_of([source]).name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("hunyuan_a13b", "hunyuan_a13b"),
        ("apertus", "apertus"),
        ("apertus2509", "apertus"),
        ("internlm", "internlm"),
        ("interns1", "internlm"),
        ("exaone4", "hermes"),
        ("trinity", "hermes"),
    ],
)
def test_names(alias: str, name: str) -> None:
    assert format_named(alias).name == name


@pytest.mark.parametrize("has_tokens", [False, True])
def test_objects_of_apertus_have_one_key(has_tokens: bool) -> None:
    def read_list(text: str) -> tuple[list[str], str]:
        found = read(APERTUS, f"<|tools_prefix|>{text}", has_tokens=has_tokens)
        return [called for called, _ in found.parsed], found.shown

    spaced = ' [ { "now" : { } } , {"get_weather": {"city": "x"}} ] <|tools_suffix|>'
    assert read_list(spaced) == (["now", "get_weather"], "")
    assert read_list('[{"now": {}}, {"now": {}}]')[0] == ["now", "now"]
    for broken in ('[{"now": {}, "get_weather": {}}]', '[{"name": "now"}]', "[]", '[{"now": null}]', '{"now": {}}'):
        called, shown = read_list(broken)
        assert not called and shown.endswith(broken)
    # A complete object is a call, whatever follows it.
    called, shown = read_list('[{"now": {}}, {"now": 1}]')
    assert called == ["now"] and shown


def test_hunyuan_may_break_lines_around_calls() -> None:
    call = "<tool_call>now\n```json\n{}\n```\n</tool_call>"
    assert read(FENCED, f"<tool_calls>\n{call}\n\n{call}\n</tool_calls>\n").parsed == [("now", {})] * 2
    assert read(FENCED, f"<tool_calls>{call}").parsed == [("now", {})]
    assert read(LISTED, "<tool_calls>[]</tool_calls>").shown == "<tool_calls>[]</tool_calls>"


def test_the_interpreter_of_internlm_is_no_tool() -> None:
    code = "<|action_start|><|interpreter|>\n```python\nprint(1)\n```<|action_end|>"
    found = read(INTERNLM, f"I compute.{code}")
    assert found.shown == f"I compute.{code}" and not found.calls


def test_k_exaone_writes_no_line_breaks() -> None:
    text = '\n\n<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>'
    assert read(HERMES, text).parsed == [("get_weather", {"city": "x"})]


def test_nemotron_4_gets_calls_as_texts_and_results_in_its_role() -> None:
    text = prompt("Nemotron-4", ASK, CALLED, result("c1", "It is windy."), tools=TOOLS)
    call = nemotron_4([("get_weather", {"city": "Rome"})])
    assert f"<extra_id_1>Assistant\n{call}\n<extra_id_1>Tool\nIt is windy.\n" in text
    assert nemotron_4(CALLS[1:2]) == '<toolcall> {"name": "now", "arguments": {}} </toolcall>'


def test_results_of_hunyuan_stand_together() -> None:
    text = prompt("Hunyuan", ASK, CALLED, result("c1", "It is windy."), tools=TOOLS)
    assert text.endswith("<tool_responses><tool_response>It is windy.</tool_response></tool_responses><|extra_0|>")
    assert '<tool_calls><tool_call>get_weather\n```json\n{"city": "Rome"}\n```</tool_call></tool_calls>' in text


def parts_of(family: str, text: str, **variables: object) -> dict[str, str]:
    """Return the thoughts, the text and the names of the calls in a family's response to a question."""
    maker, tokenizer = encoder(family)
    assert maker.reasoning_tags is not None
    pieces = maker.render_chat([ASK], TOOLS, chat_template_kwargs=variables).pieces
    prompt_ids = tokenizer.encode_pieces(pieces)
    splittings = [one.splitting(prompt_ids, OFFER) for one in maker.part_formats]
    reasoning = Reasoning.after(prompt_ids, maker.reasoning_tags, tokenizer)
    splitting = joined([reasoning, *(one for one in splittings if one is not None)])
    assert splitting is not None
    splitter = splitting.splitter()
    for token_id, mark in splitter.marks.items():
        text = text.replace(tokenizer.decode([token_id], skip_special_tokens=False), mark)
    found: dict[str, str] = {}
    for run in (*(run for char in text for run in splitter.feed(char)), *splitter.flush()):
        kind, piece = (run.call.name, run.text) if isinstance(run, PartDelta) and run.call else run  # type: ignore[misc]
        if kind is not PartKind.DROPPED:
            found[kind] = found.get(kind, "") + piece
    return found


def test_thoughts_answers_and_calls_of_hunyuan() -> None:
    call = "<tool_calls><tool_call>now\n```json\n{}\n```</tool_call></tool_calls>"
    for thought in ("<think>\nA sum.\n</think>\n", "<think>\n\n</think>\n"):
        found = {"reasoning": "A sum."} if "sum" in thought else {}
        assert parts_of("Hunyuan", f"{thought}<answer>\nFour.\n</answer>") == {**found, "text": "Four."}
        assert parts_of("Hunyuan", f"{thought}<answer>{call}</answer>") == {**found, "now": "{}"}
    # The prompt has an empty thought then.
    assert parts_of("Hunyuan", "<answer>\nFour.\n</answer>", enable_thinking=False) == {"text": "Four."}
    assert parts_of("Hunyuan", f"<answer>\n{call}\n</answer>", enable_thinking=False) == {"now": "{}"}
    assert parts_of("Hunyuan", "<answer>\nFour.\n</answer>") == {"text": "<answer>\nFour.\n</answer>"}


def test_thoughts_and_calls_of_apertus() -> None:
    thought, call = "<|inner_prefix|>I look.<|inner_suffix|>", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>'
    for text, expected in (
        (thought + call, {"reasoning": "I look.", "now": "{}"}),
        (f"{thought}Four.", {"reasoning": "I look.", "text": "Four."}),
        (call, {"now": "{}"}),
    ):
        assert parts_of("Apertus", text, enable_thinking=True) == expected


def test_no_call_of_xlam_evades_the_grammar() -> None:
    """With an optional call, all that would be read as a call is one that the grammar guides."""
    wrong = '{"city": "x", "days": "three"}'
    one = f'{{"name": "get_weather", "arguments": {wrong}}}'
    for text in (one, f"[{one}]", f"[ {one} ]", f"```json\n[{one}]\n```", f'[{{"id": 1, {one[1:]}]'):
        assert read(XLAM, text, is_guided=True).parsed and not accepts(XLAM, OFFER, text)
    for text in ("[1, 2]", "[]", '[{"a": 1}]', "No tool is suitable."):
        assert accepts(XLAM, OFFER, text) and read(XLAM, text, is_guided=True).shown == text


def test_a_thought_of_apertus_has_no_calls() -> None:
    """The grammar of a request with tools allows a call's first token only behind the thought."""
    maker, tokenizer = encoder("Apertus")
    (form,) = maker.part_formats
    assert maker.reasoning_tags is not None
    vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size)
    lark = form.grammar(OFFER, GrammarLimits())
    assert lark is not None
    grammar = whole_grammar(Grammar(lark), Reasoning(maker.reasoning_tags, Stage.AWAITED))
    call = '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>'
    for text, is_allowed in (
        (f"<|inner_prefix|>I look.<|inner_suffix|>{call}", True),
        (call, True),
        (f"<|inner_prefix|>I look.{call}", False),
    ):
        made = LLMatcher(vocabulary, grammar)
        assert not made.is_error(), made.get_error()
        token_ids = tokenizer.encode_pieces(["", text])
        assert (made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()) is is_allowed
