"""Tools, calls and results reach the prompt of every template family, also where the template knows none of them."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.formats import ToolCallFormat
from pagewick.text.tool_calls.offer import ToolChoice, ToolOffer
from tests.text.template_families import APART, FAMILIES
from tests.tiny_text import byte_level_backend

BY_NAME = {family.name: family for family in (*FAMILIES, *APART)}
# The format that is found in each template that writes calls.
FORMATS = {
    "Llama-3.1": "llama3_json", "R1-Distill": "deepseek_v3", "Mistral-v0.3": "mistral", "Mistral-Nemo": "mistral",
    "Qwen2.5": "hermes", "QwQ": "hermes", "Qwen3": "hermes", "Phi-4-mini": "phi4_mini_json", "GLM-4-0414": "glm4",
    "GLM-4-9B-chat": "glm4", "DeepSeek-V2.5": "deepseek_v3", "DeepSeek-V3": "deepseek_v3",
    "DeepSeek-R1": "deepseek_v3", "DeepSeek-V3-0324": "deepseek_v3", "DeepSeek-R1-0528": "deepseek_v3",
    "Granite-3": "granite", "Gemma-2": "gemma3", "Gemma-3": "gemma3",
    "DeepSeek-V3.2": "deepseek_v32", "Seed-OSS": "seed_oss", "OLMo-3": "olmo3", "Gemma-4": "gemma4",
    "LFM2": "lfm2", "LFM2.5": "lfm2", "Llama-4": "pythonic", "Nemotron-Nano-v2": "nemotron_json",
    "Hunyuan": "hunyuan_fenced", "InternLM": "internlm", "Nemotron-4": "nemotron4", "Apertus": "apertus",
    "Hy3": "hy_v3", "MiMo-V2": "mimo", "Laguna": "glm45", "FireFunction-v2": "firefunction",
    "Functionary-v3.1": "functionary_v31", "Functionary-v3.2": "functionary_v32", "MiniMax-M1": "minimax_m1",
    "MiniMax-M3": "minimax_m3", "Muse-Glimmer": "muse_glimmer", "Kimi-K3": "kimi_k3",
}  # fmt: skip
# Templates that write calls otherwise than the model does, or open a thought in the prompt.
WRITTEN_OTHERWISE = (
    "R1-Distill", "QwQ", "GLM-4-0414", "GLM-4-9B-chat", "DeepSeek-R1", "ERNIE-4.5-Thinking", "Llama-4",
    "Nemotron-Nano-v2",
)  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Look.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
OFFER = ToolOffer.of(TOOLS, ToolChoice())
ASK = {"role": "user", "content": "How is it?"}


def call(call_id: str, name: str, **arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CALLED = {"role": "assistant", "content": None, "tool_calls": [call("c1", "get_weather", city="Rome")]}
TWO = {"role": "assistant", "tool_calls": [call("c1", "get_weather", city="Rome"), call("c2", "now")]}
# As chat templates of transformers take them.
WITHOUT_IDS = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in ("get_weather", "now")],
}
ANSWER = {"role": "assistant", "content": "Sunny."}


@functools.cache
def encoder(name: str, tool_call_parser: str | None = None) -> tuple[PromptEncoder, Tokenizer]:
    family = BY_NAME[name]
    text = json.dumps({**json.loads(byte_level_backend().to_str()), "added_tokens": []})
    backend = tokenizers.Tokenizer.from_str(text)
    backend.add_special_tokens(family.special)
    backend.add_tokens([AddedToken(word, normalized=False) for word in family.words.split(" ") if word])
    config = {"eos_token": family.eos, **({"bos_token": family.bos} if family.bos else {})}
    tokenizer = Tokenizer(backend, config=config)
    template = ChatTemplate({"default": family.source}, tokenizer)
    return PromptEncoder(tokenizer, template, max_model_len=4096, tool_call_parser=tool_call_parser), tokenizer


def prompt(name: str, *messages: dict[str, Any], **how: Any) -> str:
    return encoder(name)[0].render_chat(messages, **how).text


each_family = pytest.mark.parametrize("name", BY_NAME)


@each_family
def test_the_format_is_found(name: str) -> None:
    (form,) = encoder(name)[0].part_formats
    assert isinstance(form, ToolCallFormat) and form.form.name == FORMATS.get(name, "hermes")


@each_family
def test_tools_are_described(name: str) -> None:
    text = prompt(name, ASK, tools=TOOLS)
    assert "get_weather" in text and "city" in text and "How is it?" in text
    if BY_NAME[name].has_system:
        system = {"role": "system", "content": "Be brief."}
        assert "Be brief." in prompt(name, system, ASK, tools=TOOLS)


@each_family
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_calls_and_results_are_written(name: str, tools: Any) -> None:
    text = prompt(name, ASK, CALLED, result("c1", "It is windy."), tools=tools)
    places = [text.rindex(word) for word in ("How is it?", "Rome", "windy")]
    assert places == sorted(places) and "get_weather" in text
    text = prompt(name, ASK, CALLED, result("c1", "It is windy."), ANSWER, {"role": "user", "content": "And now?"})
    assert text.index("windy") < text.index("Sunny.") < text.index("And now?")


@each_family
def test_two_calls_of_one_message(name: str) -> None:
    text = prompt(name, ASK, TWO, result("c1", "It is windy."), result("c2", "Noon."), tools=TOOLS)
    assert text.index("windy") < text.index("Noon.") and text.count("Rome") == 1 and "now" in text


@each_family
def test_the_former_form_of_calls(name: str) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    asked = {"role": "assistant", "content": None, "function_call": function}
    answered = {"role": "function", "name": "get_weather", "content": "It is windy."}
    text = prompt(name, ASK, asked, answered, tools=TOOLS)
    assert text.index("Rome") < text.index("windy")


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in WRITTEN_OTHERWISE])
def test_calls_that_the_template_writes_are_read_back(name: str) -> None:
    """The response that the template writes into a prompt is what its format reads."""
    maker, tokenizer = encoder(name)
    (form,) = maker.part_formats
    begun = prompt(name, ASK, tools=TOOLS)
    whole = prompt(name, ASK, CALLED, tools=TOOLS, add_generation_prompt=False)
    assert "Rome" in whole and whole.startswith(begun)
    splitting = form.splitting([], OFFER)
    assert splitting is not None
    splitter = splitting.splitter()
    response = whole[len(begun) :]
    for token_id, mark in splitter.marks.items():
        response = response.replace(tokenizer.decode([token_id], skip_special_tokens=False), mark)
    parts = [run for run in (*splitter.feed(response), *splitter.flush()) if not isinstance(run, tuple)]
    assert {part.call.name for part in parts if part.call} == {"get_weather"}
    assert json.loads("".join(part.text for part in parts)) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([ASK, CALLED, result("c2", "x")], "messages[2].tool_call_id"),
        ([ASK, CALLED, result("c1", "x"), result("c1", "x")], "messages[3].tool_call_id"),
        ([ASK, CALLED, ANSWER, result("c1", "x")], "messages[3].tool_call_id"),
        ([ASK, TWO, {"role": "tool", "content": "x"}], "messages[2].tool_call_id"),
        ([ASK, CALLED, {"role": "tool", "content": "x"}], "messages[2].tool_call_id"),
        ([ASK, CALLED, {"role": "tool", "tool_call_id": None, "name": "get_weather"}], "messages[2].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([ASK, ANSWER, {"role": "tool", "content": "x", "name": "now"}, ASK], "messages[2].tool_call_id"),
        ([ASK, WITHOUT_IDS, {"role": "tool", "name": "no", "content": "x"}], "messages[2].tool_call_id"),
        ([ASK, {"role": "assistant", "tool_calls": [call("c1", "now"), call("c1", "now")]}],
         "messages[1].tool_calls[1].id"),
        ([ASK, {"role": "assistant", "tool_calls": [{"id": "c1"}]}], "messages[1].tool_calls[0]"),
        ([ASK, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {}}]}],
         "messages[1].tool_calls[0].function.name"),
        ([ASK, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": 1}}]}],
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_calls_and_results_that_do_not_belong_together(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        prompt("Qwen3", *messages)
    assert raised.value.param == param and param in str(raised.value)


def test_results_of_calls_without_ids_need_none() -> None:
    """Such results answer the calls in their order, or by their names; so does one of a call of the former form."""
    one = {**WITHOUT_IDS, "tool_calls": WITHOUT_IDS["tool_calls"][:1]}
    former = {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}}
    for calling, *results in (
        (one, {"role": "tool", "content": "windy"}),
        (WITHOUT_IDS, {"role": "tool", "name": "now", "content": "windy"}, {"role": "tool", "content": "noon"}),
        (WITHOUT_IDS, {"role": "tool", "content": "windy"}, {"role": "tool", "content": "noon"}),
        (former, {"role": "function", "content": "windy"}),
        (former, {"role": "tool", "content": "windy"}),
    ):
        assert "windy" in prompt("Qwen3", ASK, calling, *results)


def test_results_without_any_call_are_kept() -> None:
    assert "orphan" in prompt("Qwen3", {"role": "function", "name": "now", "content": "an orphan"}, ASK)
    assert "orphan" in prompt("Qwen3", result("c1", "an orphan"), ASK)


def test_ids_that_templates_demand() -> None:
    text = prompt("Mistral-Nemo", ASK, CALLED, result("c1", "1"), ANSWER, ASK)
    written = re.findall(r'"id": "([a-zA-Z0-9]{9})"', text)
    assert re.findall(r'"call_id": "([a-zA-Z0-9]{9})"', text) == written and len(written) == 1
    kept = "Abc123xyZ"
    again = {**CALLED, "tool_calls": [call(kept, "now")]}
    assert prompt("Mistral-Nemo", ASK, again, result(kept, "1"), ANSWER, ASK).count(kept) == 2


@each_family
@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("place", range(4))
def test_parts_that_are_no_text_are_refused_in_every_message(name: str, tools: Any, place: int) -> None:
    """Also in messages that become parts of others, where the template knows no tools or results."""
    image = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    messages: list[dict[str, Any]] = [ASK, {**CALLED, "content": "I look."}, result("c1", "It is windy."), ANSWER]
    parts = [{"type": "text", "text": messages[place]["content"]}]
    messages[place] = {**messages[place], "content": parts}
    assert parts[0]["text"] in prompt(name, *messages, tools=tools) or place == 1
    messages[place] = {**messages[place], "content": [*parts, image]}
    with pytest.raises(UnsupportedError, match="has type 'image_url'") as raised:
        prompt(name, *messages, tools=tools)
    assert raised.value.param == f"messages[{place}].content"


def test_smollm3_reads_tools_under_names_of_its_own() -> None:
    """Also under that of Python's tools, for the parser of such calls, unless the client gives them itself."""
    as_json, in_python = (encoder("SmolLM3", name)[0] for name in (None, "smollm3_code"))
    assert as_json.template_tools is not None and as_json.template_tools.lists_tools
    assert not as_json.template_tools.writes_calls and as_json.template_tools.writes_results
    text = as_json.render_chat([ASK, CALLED, result("c1", "windy")], TOOLS).text
    assert text.count("get_weather") == 2 and "<code>" not in text and "# Functions" not in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
    text = in_python.render_chat([ASK, CALLED, result("c1", "windy")], TOOLS).text
    assert text.count("<tool_call>") == 0 and "<code>\nget_weather(city='Rome')\n</code><|im_end|>" in text
    for variable in ("xml_tools", "python_tools"):
        text = as_json.render_chat([ASK], TOOLS, chat_template_kwargs={variable: ["my own"]}).text
        assert "my own" in text and "get_weather" not in text


def test_a_budget_switches_thinking_off_for_seed() -> None:
    maker, _ = encoder("Seed-OSS")
    assert maker.can_think_by_switch
    for variables, expected in (
        ({}, "assistant\n"),
        ({"thinking": True}, "assistant\n"),
        ({"enable_thinking": False}, "assistant\n<seed:think><seed:cot_budget_reflect>"),
        ({"enable_thinking": False, "thinking_budget": -1}, "assistant\n"),
    ):
        assert maker.render_chat([ASK], chat_template_kwargs=variables).text.endswith("<seed:bos>" + expected)
    text = maker.render_chat([ASK], chat_template_kwargs={"thinking_budget": 512}).text
    assert "thinking budget is 512" in text and text.endswith("assistant\n")


def test_apertus_gets_a_text_beside_calls() -> None:
    """Its template refuses a message without content, which clients send where a response has only calls."""
    maker, _ = encoder("Apertus")
    assert maker.template_tools is not None and maker.template_tools.needs_text
    text = prompt("Apertus", ASK, TWO, result("c1", "windy"), result("c2", "noon"), tools=TOOLS)
    assert '<|assistant_start|><|tools_prefix|>[{"get_weather": {"city": "Rome"}}, {"now": {}}]<|tools_suffix|>' in text
    assert text.endswith("[windy, noon]<|assistant_start|>")
