"""Calls as each family publishes them, written anew from its documentation, apart from the code that is tested."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pagewick.text.tool_calls.formats import ToolCallFormat, format_named
from pagewick.text.tool_calls.offer import Tool, ToolOffer

Call = tuple[str, dict[str, Any]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> list[dict[str, Any]]:
    return [{name: called, arguments: given} for called, given in calls]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{dumped(one)}\n</tool_call>" for one in _objects(calls))


def hermes_2(calls: Sequence[Call]) -> str:
    objects = [{"arguments": given, "name": called} for called, given in calls]
    return "\n".join(f"<tool_call>{dumped(one)}</tool_call>" for one in objects)


def qwen_coder(calls: Sequence[Call]) -> str:
    text = []
    for name, given in calls:
        lines = [f"<tool_call>\n<function={name}>"]
        for key, value in given.items():
            lines += [f"<parameter={key}>", value if isinstance(value, str) else dumped(value), "</parameter>"]
        text.append("\n".join([*lines, "</function>\n</tool_call>"]))
    return "\n".join(text)


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(map(dumped, _objects(calls, arguments="parameters")))


def llama_tag(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + llama(calls)


def python(value: Any) -> str:
    return repr(value)


def _python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={python(value)}' for key, value in call[1].items())})"


def pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_python_call, calls))}]"


def llama_4(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def mistral(calls: Sequence[Call]) -> str:
    objects = [{**one, "id": f"abcdEF{place:03}"} for place, one in enumerate(_objects(calls))]
    return f"[TOOL_CALLS] {dumped(objects)}"


def mistral_7(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS]{dumped(_objects(calls))}"


def mistral_11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdEF001[ARGS]{dumped(given)}" for name, given in calls)


def mistral_13(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}" for name, given in calls)


def deepseek_3(calls: Sequence[Call]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(blocks)}<｜tool▁calls▁end｜>"


def deepseek_31(calls: Sequence[Call]) -> str:
    blocks = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>"


def deepseek_32(calls: Sequence[Call]) -> str:
    lines = ["<｜DSML｜function_calls>"]
    for name, given in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in given.items():
            kind, shown = ("true", value) if isinstance(value, str) else ("false", dumped(value))
            lines.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{shown}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, "</｜DSML｜function_calls>"])


def glm_4(calls: Sequence[Call]) -> str:
    ((name, given),) = calls
    return f"{name}\n{dumped(given)}"


def glm_45(calls: Sequence[Call]) -> str:
    text = []
    for name, given in calls:
        lines = [f"<tool_call>{name}"]
        for key, value in given.items():
            shown = value if isinstance(value, str) else dumped(value)
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{shown}</arg_value>"]
        text.append("\n".join([*lines, "</tool_call>"]))
    return "\n".join(text)


def glm_47(calls: Sequence[Call]) -> str:
    return glm_45(calls).replace("\n<arg", "<arg").replace("\n</tool_call>", "</tool_call>")


def phi_4(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{dumped(_objects(calls))}<|/tool_call|>"


def phi_4_functools(calls: Sequence[Call]) -> str:
    return f"functools{dumped(_objects(calls))}"


def gemma_3(calls: Sequence[Call]) -> str:
    return "\n".join(["```tool_code", *map(_python_call, calls), "```"])


def smollm_3_code(calls: Sequence[Call]) -> str:
    return "\n".join(["<code>", *map(_python_call, calls), "</code>"])


def gemma_3_printed(calls: Sequence[Call]) -> str:
    return "\n".join(["```tool_code", *(f"print({_python_call(call)})" for call in calls), "```"])


def in_braces(call: Call, quote: str) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{shown(one)}" for key, one in value.items()) + "}"
        return f"[{','.join(map(shown, value))}]" if isinstance(value, list) else dumped(value)

    return f"call:{call[0]}{shown(call[1])}"


def function_gemma(calls: Sequence[Call]) -> str:
    return "".join(f"<start_function_call>{in_braces(call, '<escape>')}<end_function_call>" for call in calls)


def gemma_4(calls: Sequence[Call]) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>{in_braces(call, quote)}<tool_call|>" for call in calls)


def granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{dumped(_objects(calls))}"


def granite_tag(calls: Sequence[Call]) -> str:
    return f"<tool_call>{dumped(_objects(calls))}"


def command_r(calls: Sequence[Call]) -> str:
    actions = json.dumps(_objects(calls, "tool_name", "parameters"), indent=4, ensure_ascii=False)
    return f"Action: ```json\n{actions}\n```"


def command_r7b(calls: Sequence[Call]) -> str:
    objects = enumerate(_objects(calls, "tool_name", "parameters"))
    actions = [{"tool_call_id": str(place), **one} for place, one in objects]
    return f"<|START_ACTION|>[\n    {(',' + chr(10) + '    ').join(map(dumped, actions))}\n]<|END_ACTION|>"


def kimi(calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{dumped(given)}<|tool_call_end|>"
        for place, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"


def minimax(calls: Sequence[Call]) -> str:
    lines = ["<minimax:tool_call>"]
    for name, given in calls:
        lines.append(f'<invoke name="{name}">')
        for key, value in given.items():
            shown = value if isinstance(value, str) else dumped(value)
            lines.append(f'<parameter name="{key}">{shown}</parameter>')
        lines.append("</invoke>")
    return "\n".join([*lines, "</minimax:tool_call>"])


def olmo_3(calls: Sequence[Call]) -> str:
    lines = [f"{name}({', '.join(f'{key}={dumped(one)}' for key, one in given.items())})" for name, given in calls]
    return f"<function_calls>{chr(10).join(lines)}</function_calls>"


def olmo_3_python(calls: Sequence[Call]) -> str:
    return "\n".join(["<function_calls>", *map(_python_call, calls), "</function_calls>"])


def seed_oss(calls: Sequence[Call]) -> str:
    text = []
    for name, given in calls:
        lines = [f"<seed:tool_call>\n<function={name}>"]
        for key, value in given.items():
            lines.append(f"<parameter={key}>{value if isinstance(value, str) else dumped(value)}</parameter>")
        text.append("\n".join([*lines, "</function>\n</seed:tool_call>"]))
    return "\n".join(text)


def lfm_2(calls: Sequence[Call]) -> str:
    def shown(value: Any) -> str:
        return dumped(value) if isinstance(value, str | dict) else python(value)

    listed = (f"{name}({', '.join(f'{key}={shown(one)}' for key, one in given.items())})" for name, given in calls)
    return f"<|tool_call_start|>[{', '.join(listed)}]<|tool_call_end|>"


def lfm_2_python(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def lfm_2_objects(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{dumped(_objects(calls))}<|tool_call_end|>"


def nemotron(calls: Sequence[Call]) -> str:
    return f"<TOOLCALL>{dumped(_objects(calls))}</TOOLCALL>"


def nemotron_parameters(calls: Sequence[Call]) -> str:
    return f"<TOOLCALL>{dumped(_objects(calls, arguments='parameters'))}</TOOLCALL>"


def plain_list(calls: Sequence[Call]) -> str:
    return dumped(_objects(calls))


def fenced_list(calls: Sequence[Call]) -> str:
    return f"```json\n{dumped(_objects(calls))}\n```"


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
    Family("hermes", hermes), Family("hermes", hermes_2), Family("qwen3_coder", qwen_coder),
    Family("llama3_json", llama, is_bare=True), Family("llama3_json", llama_tag),
    Family("pythonic", pythonic, is_bare=True), Family("pythonic", llama_4),
    Family("mistral", mistral), Family("mistral", mistral_7), Family("mistral_v11", mistral_11),
    Family("mistral_v11", mistral_13), Family("deepseek_v3", deepseek_3), Family("deepseek_v31", deepseek_31),
    Family("deepseek_v32", deepseek_32),
    Family("glm4", glm_4, is_bare=True, max_calls=1), Family("glm45", glm_45), Family("glm45", glm_47),
    Family("phi4_mini_json", phi_4), Family("phi4_mini_json", phi_4_functools), Family("gemma3", gemma_3),
    Family("gemma3", gemma_3_printed), Family("functiongemma", function_gemma), Family("gemma4", gemma_4),
    Family("olmo3", olmo_3), Family("olmo3", olmo_3_python), Family("seed_oss", seed_oss),
    Family("smollm3_code", smollm_3_code), Family("granite", granite),
    Family("granite", granite_tag), Family("command_r", command_r), Family("command_r7b", command_r7b),
    Family("lfm2", lfm_2), Family("lfm2", lfm_2_python), Family("lfm2", lfm_2_objects),
    Family("nemotron_json", nemotron), Family("nemotron_json", nemotron_parameters),
    Family("kimi_k2", kimi), Family("minimax_m2", minimax), Family("json", plain_list, is_bare=True),
    Family("json", fenced_list, is_bare=True), Family("json", llama, is_bare=True),
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
