"""The forms of calls with their formats, the tools that are called, and tokenizers with and without the markers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pagewick.text.tool_calls.formats import ToolCallFormat, format_named
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from tests.text.tool_calls import forms, later_forms
from tests.text.tool_calls.forms import Call


@dataclass(frozen=True)
class Family:
    """A way to write calls. parser: the name of its format. is_bare: only at the beginning of a response."""

    parser: str
    write: Callable[[Sequence[Call]], str]
    is_bare: bool = False
    max_calls: int = 9

    @property
    def name(self) -> str:
        return self.write.__name__


FAMILIES = [
    Family("hermes", forms.hermes), Family("hermes", forms.hermes_2), Family("qwen3_coder", forms.qwen_coder),
    Family("llama3_json", forms.llama, is_bare=True), Family("llama3_json", forms.llama_tag),
    Family("pythonic", forms.pythonic, is_bare=True), Family("pythonic", forms.llama_4),
    Family("mistral", forms.mistral), Family("mistral", forms.mistral_7), Family("mistral_v11", forms.mistral_11),
    Family("mistral_v11", forms.mistral_13), Family("deepseek_v3", forms.deepseek_3),
    Family("deepseek_v31", forms.deepseek_31), Family("deepseek_v32", forms.deepseek_32),
    Family("deepseek_v4", forms.deepseek_4), Family("minicpm5", forms.minicpm_5),
    Family("minicpm5", forms.minicpm_5_lines), Family("gigachat3", forms.gigachat_3, max_calls=1),
    Family("gigachat31", forms.gigachat_31, max_calls=1),
    Family("glm4", forms.glm_4, is_bare=True, max_calls=1), Family("glm45", forms.glm_45),
    Family("glm45", forms.glm_47), Family("phi4_mini_json", forms.phi_4),
    Family("phi4_mini_json", forms.phi_4_functools), Family("gemma3", forms.gemma_3),
    Family("gemma3", forms.gemma_3_printed), Family("functiongemma", forms.function_gemma),
    Family("gemma4", forms.gemma_4), Family("olmo3", forms.olmo_3), Family("olmo3", forms.olmo_3_python),
    Family("seed_oss", forms.seed_oss), Family("smollm3_code", forms.smollm_3_code), Family("granite", forms.granite),
    Family("granite", forms.granite_tag), Family("command_r", forms.command_r),
    Family("command_r7b", forms.command_r7b), Family("lfm2", forms.lfm_2), Family("lfm2", forms.lfm_2_python),
    Family("lfm2", forms.lfm_2_objects), Family("nemotron_json", forms.nemotron),
    Family("nemotron_json", forms.nemotron_parameters), Family("nemotron4", forms.nemotron_4),
    Family("hunyuan_fenced", forms.hunyuan), Family("hunyuan_fenced", forms.hunyuan_lines),
    Family("hunyuan_a13b", forms.hunyuan_list), Family("hunyuan_a13b", forms.apriel), Family("apertus", forms.apertus),
    Family("internlm", forms.internlm), Family("internlm", forms.internlm_arguments), Family("kimi_k2", forms.kimi),
    Family("hy_v3", forms.hy_3), Family("hy_v3_preview", forms.hy_3_preview), Family("mimo", forms.mimo),
    Family("minimax_m2", forms.minimax), Family("xlam", forms.xlam, is_bare=True),
    Family("seed_oss", later_forms.seed_oss_python),
    Family("minicpm5", later_forms.minicpm_5_python), Family("firefunction", later_forms.firefunction),
    Family("functionary_v31", later_forms.functionary_31), Family("minimax_m1", later_forms.minimax_m1),
    Family("minimax_m3", later_forms.minimax_m3),
    Family("json", forms.plain_list, is_bare=True), Family("json", forms.fenced_list, is_bare=True),
    Family("json", forms.llama, is_bare=True),
]  # fmt: skip


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = (), **more: Any) -> Tool:
    return Tool(name, {"type": "object", "properties": properties, "required": list(required)}, **more)


TOOLS = (
    tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}}, ["city"]),
    tool("now", {}),
    tool(
        "mix-it_2",
        {
            "flag": {"type": "boolean"},
            "xs": {"type": "array", "items": {"type": "number"}},
            "deep": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
            "kind": {"type": "string", "enum": ["a", "b c"]},
            "maybe": {"type": ["string", "null"]},
        },
        ["flag"],
    ),
)
OFFER = ToolOffer(TOOLS)
CALLS: list[Call] = [
    ("get_weather", {"city": 'Zürich "am See" \\ <&> 天气 😀\n2nd, {line}: [x] it\'s', "days": 3}),
    ("now", {}),
    ("mix-it_2", {"flag": True, "xs": [1, -2.5, 3e-07], "deep": {"a": "q", "b": 0}, "kind": "b c", "maybe": None}),
    ("mix-it_2", {"flag": False, "xs": []}),
]
# The texts of tests that take long are short.
SHORT_CALLS: list[Call] = [("get_weather", {"city": 'é"\\😀\n,]}', "days": 3}), ("now", {})]


class NoTokens:
    """A tokenizer's part that formats read, without any marker as a token."""

    added_tokens: Mapping[str, bool] = MappingProxyType({})

    def id_of(self, token: str) -> int | None:
        return None


class AllTokens(NoTokens):
    """Every marker of a format is a token."""

    def __init__(self, words: Sequence[str]) -> None:
        self.added_tokens = dict.fromkeys(words, True)
        self._ids = {word: 100 + place for place, word in enumerate(words)}

    def id_of(self, token: str) -> int | None:
        return self._ids[token]


def format_with(family: Family, *, has_tokens: bool) -> ToolCallFormat:
    form = format_named(family.parser)
    tokenizer: Any = AllTokens(form.words) if has_tokens else NoTokens()
    return ToolCallFormat(form, tokenizer)
