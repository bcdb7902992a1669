"""LFM2, Nemotron, Granite 4 and Falcon-H1: which format their templates show, and how their models deviate from it."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.outputs import PartKind
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.tool_calls.formats import format_named, format_of
from pagewick.text.tool_calls.offer import ToolOffer
from tests.text.tool_calls.families import TOOLS, tool
from tests.text.tool_calls.later_forms import lfm_25
from tests.text.tool_calls.test_formats import BY_FAMILY, read
from tests.text.tool_calls.test_prompts_with_tools import ASK, BY_NAME, CALLED, encoder, prompt, result
from tests.text.tool_calls.test_prompts_with_tools import TOOLS as FUNCTIONS

LFM, NEMOTRON, HERMES, CODER = (BY_FAMILY[name] for name in ("lfm_2", "nemotron", "hermes", "qwen_coder"))
TREE = tool(
    "Calendar.create_event",
    {
        "title": {"type": "string"},
        "all_day": {"type": "boolean"},
        "tags": {"type": "array"},
        "more": {"type": "object"},
        "end": {},
    },
)
OFFER = ToolOffer((*TOOLS, TREE))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("List of tools: <|tool_list_start|>[ ... <|im_start|>", "lfm2"),
        ("{% set keep_past_thinking = 1 %} List of tools: [ ... <|im_start|>", "lfm2"),
        ("<|tool_call_start|>[ ... ]<|tool_call_end|>", "lfm2"),
        ("<SPECIAL_11>User <AVAILABLE_TOOLS> <TOOLCALL>[ ...", "nemotron_json"),
        ('<|start_header_id|>system ... <AVAILABLE_TOOLS> ... "parameters": ... <TOOLCALL>', "nemotron_json"),
        ("<|im_start|> <tool_call>\n<function=example_function>\n<parameter=a>\n", "qwen3_coder"),  # Nemotron 3
        ("<|start_of_role|>assistant ... <tool_call>\n", "hermes"),  # Granite 4
        ("<|im_start|> ... <tool_call>\n[\n", "hermes"),  # Falcon-H1
        ("<|im_start|> ... List of tools: []", "hermes"),
    ],
)
def test_the_format_of_a_template(source: str, name: str) -> None:
    assert format_of([source]).name == name


@pytest.mark.parametrize(
    ("alias", "name"),
    [("lfm2", "lfm2"), ("lfm2.5", "lfm2"), ("nemotron_nano_v2", "nemotron_json"), ("granite4", "hermes")],
)
def test_names(alias: str, name: str) -> None:
    assert format_named(alias).name == name


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    "city", ["it's", "l'été, d'où (qu'on)", 'the "5"x', "a\nb", "'80s", "C:\\ on", "", "a 'b' c, d=1"]
)
def test_texts_of_lfm_25_have_quotes_that_are_not_escaped(city: str, has_tokens: bool) -> None:
    """Those within words are no ends. Where one may be an end, the whole call stays text."""
    calls = [("get_weather", {"city": city, "days": 3})]
    text = lfm_25(calls)
    for cuts in ((), range(1, len(text))):
        found = read(LFM, text, *cuts, has_tokens=has_tokens)
        if " 'b' " in city:
            assert not found.calls and found.shown == found.fed
        else:
            assert found.parsed == calls and found.shown == ""


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("title='demo', all_day=True, end=None", {"title": "demo", "all_day": True, "end": None}),
        ('title="demo", all_day=false, end=null', {"title": "demo", "all_day": False, "end": None}),
        ('more={"a": [1, {"b": true}], \'c\': None}', {"more": {"a": [1, {"b": True}], "c": None}}),
        (r"""title="a \"b\" 'c' \\ \n \u00e9 \'" , tags=['x', -1.5e3, ("y",),]""",
         {"title": "a \"b\" 'c' \\ \n é '", "tags": ["x", -1500.0, ["y"]]}),
        ('title=")]<|", tags=[]', {"title": ")]<|", "tags": []}),
        ("", {}),
    ],
)  # fmt: skip
def test_values_as_lfm2_writes_them(arguments: str, found: dict[str, Any], has_tokens: bool) -> None:
    text = f"I look.<|tool_call_start|>[ Calendar.create_event({arguments}), now()]<|tool_call_end|>Wait."
    whole = read(LFM, text, has_tokens=has_tokens, offer=OFFER)
    assert whole.parsed == [("Calendar.create_event", found), ("now", {})]
    assert whole.shown == "I look.Wait." and whole.whole == whole.fed
    for cut in range(len(whole.fed)):
        part = read(LFM, text, cut, has_tokens=has_tokens, offer=OFFER)
        assert (part.calls, part.shown) == (whole.calls, whole.shown)


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call_start|>now()<|tool_call_end|>",
        "<|tool_call_start|>[]<|tool_call_end|>",
        "<|tool_call_start|>[now(<|tool_call_end|>",
        "<|tool_call_start|>[now)]<|tool_call_end|>",
        '<|tool_call_start|>[get_weather(city="a "b" c")]<|tool_call_end|>',
        "<|tool_call_start|>[get_weather(city=__import__('os'))]<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(**{'city': 'x'})]<|tool_call_end|>",
        "[now()]",
        "<|tool_list_start|>[now()]<|tool_list_end|>",
    ],
)
def test_what_is_no_list_of_calls_is_text(text: str) -> None:
    found = read(LFM, text, offer=OFFER)
    assert not found.calls and found.shown == text


@pytest.mark.parametrize(
    "text", ["<TOOLCALL>[]</TOOLCALL>", '<TOOLCALL>[{"name": "now", "arguments": "x"}]</TOOLCALL>']
)
def test_what_is_no_list_of_objects_is_text(text: str) -> None:
    found = read(NEMOTRON, text)
    assert not found.calls and found.shown == text


def test_objects_as_nemotron_writes_them() -> None:
    text = (
        '<TOOLCALL>[{"name": "now", "arguments": "{}"}, {"arguments": {"city": "a</TOOLCALL>"}, "name": "get_weather"}]'
    )
    assert read(NEMOTRON, text).parsed == [("now", {}), ("get_weather", {"city": "a</TOOLCALL>"})]


def test_falcon_h1_writes_a_list_between_hermes_tags() -> None:
    second = '{"name": "get_weather", "arguments": {"city": "x"}}'
    text = f'<tool_call>\n[\n  {{"name": "now", "arguments": {{}}}},\n  {second}\n]\n</tool_call>'
    assert read(HERMES, text).parsed == [("now", {}), ("get_weather", {"city": "x"})]


def test_nemotron_3_writes_tags() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>\n"
    assert read(CODER, text).parsed == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [("LFM2", "<|im_start|>tool\n<|tool_response_start|>", "<|tool_response_end|><|im_end|>"),
     ("LFM2.5", "<|im_start|>tool\n", "<|im_end|>"),
     ("Nemotron-Nano-v2", "<SPECIAL_11>User\n<TOOL_RESPONSE>[", "]</TOOL_RESPONSE>")],
)  # fmt: skip
def test_results_have_the_familys_role(name: str, opening: str, closing: str) -> None:
    text = prompt(name, ASK, CALLED, result("c1", "It is windy."), tools=FUNCTIONS)
    assert f"{opening}It is windy.{closing}" in text
    opener, closer = (
        ("<TOOLCALL>", "</TOOLCALL>") if "Nemotron" in name else ("<|tool_call_start|>", "<|tool_call_end|>")
    )
    written = 'get_weather(city="Rome")' if "LFM" in name else '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    assert f"{opener}[{written}]{closer}" in text


def test_a_template_that_writes_every_role_gets_that_of_results() -> None:
    text = prompt("Seed-OSS", ASK, CALLED, result("c1", "It is windy."), tools=FUNCTIONS)
    assert "</seed:tool_call><seed:eos><seed:bos>tool\nIt is windy.<seed:eos>" in text


@pytest.mark.parametrize(
    ("name", "question", "stage"),
    [
        ("LFM2.5", "Hi", Stage.AWAITED),
        ("Nemotron-Nano-v2", "Hi", Stage.OPENED),
        ("Nemotron-Nano-v2", "Hi /no_think", Stage.AWAITED),
    ],
)
def test_thoughts_and_calls(name: str, question: str, stage: Stage) -> None:
    maker, tokenizer = encoder(name)
    tags = ReasoningTags.find(tokenizer, [BY_NAME[name].source])
    assert tags is not None and (tags.start, tags.end) == ("<think>", "</think>")
    pieces = maker.render_chat([{"role": "user", "content": question}], tools=FUNCTIONS).pieces
    reasoning = Reasoning.after(tokenizer.encode_pieces(pieces), tags, tokenizer)
    assert reasoning.stage is stage
    splitter = reasoning.splitter()
    marks = {tokenizer.decode([token_id], skip_special_tokens=False): mark for token_id, mark in splitter.marks.items()}
    text = "<think>\n" * (stage is Stage.AWAITED) + "A call.\n</think>\n\n"
    for word, mark in marks.items():
        text = text.replace(word, mark)
    runs = [*splitter.feed(f"{text}Yes."), *splitter.flush()]
    assert "".join(part[1] for part in runs if isinstance(part, tuple) and part[0] is PartKind.REASONING) == "A call."
    assert "".join(part[1] for part in runs if isinstance(part, tuple) and part[0] is PartKind.TEXT) == "Yes."


def test_lfm2_without_thoughts_has_no_tags() -> None:
    assert ReasoningTags.find(encoder("LFM2")[1], [BY_NAME["LFM2"].source]) is None
