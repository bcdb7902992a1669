"""Calls as each family publishes them, written anew from its documentation, apart from the code that is tested."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def enveloped(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> list[dict[str, Any]]:
    return [{name: called, arguments: given} for called, given in calls]


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{dumped(one)}\n</tool_call>" for one in enveloped(calls))


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
    return "; ".join(map(dumped, enveloped(calls, arguments="parameters")))


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
    objects = [{**one, "id": f"abcdEF{place:03}"} for place, one in enumerate(enveloped(calls))]
    return f"[TOOL_CALLS] {dumped(objects)}"


def mistral_7(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS]{dumped(enveloped(calls))}"


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


def deepseek_4(calls: Sequence[Call]) -> str:
    return deepseek_32(calls).replace("function_calls>", "tool_calls>")


def minicpm_5(calls: Sequence[Call]) -> str:
    text = []
    for name, given in calls:
        params = ""
        for key, value in given.items():
            shown = value if isinstance(value, str) else dumped(value)
            if isinstance(value, str) and any(char in value for char in "<&\n"):
                shown = f"<![CDATA[{value}]]>"
            params += f'<param name="{key}">{shown}</param>'
        text.append(f'<function name="{name}">{params}</function>')
    return "\n".join(text)


def minicpm_5_lines(calls: Sequence[Call]) -> str:
    return minicpm_5(calls).replace("<param ", "\n  <param ").replace("</function>", "\n</function>")


def gigachat_3(calls: Sequence[Call]) -> str:
    ((name, given),) = calls
    return f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "{name}", "arguments": {dumped(given)}}}'


def gigachat_31(calls: Sequence[Call]) -> str:
    ((name, given),) = calls
    return f'<|function_call|>{{"name": "{name}", "arguments": {dumped(given)}}}'


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
    return f"<|tool_call|>{dumped(enveloped(calls))}<|/tool_call|>"


def phi_4_functools(calls: Sequence[Call]) -> str:
    return f"functools{dumped(enveloped(calls))}"


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
    return f"<|tool_call|>{dumped(enveloped(calls))}"


def granite_tag(calls: Sequence[Call]) -> str:
    return f"<tool_call>{dumped(enveloped(calls))}"


def command_r(calls: Sequence[Call]) -> str:
    actions = json.dumps(enveloped(calls, "tool_name", "parameters"), indent=4, ensure_ascii=False)
    return f"Action: ```json\n{actions}\n```"


def command_r7b(calls: Sequence[Call]) -> str:
    objects = enumerate(enveloped(calls, "tool_name", "parameters"))
    actions = [{"tool_call_id": str(place), **one} for place, one in objects]
    return f"<|START_ACTION|>[\n    {(',' + chr(10) + '    ').join(map(dumped, actions))}\n]<|END_ACTION|>"


def kimi(calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{dumped(given)}<|tool_call_end|>"
        for place, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"


def hy_3(calls: Sequence[Call]) -> str:
    return re.sub(r"<(/?[a-z_]+)>", r"<\1:opensource>", hy_3_preview(calls))


def hy_3_preview(calls: Sequence[Call]) -> str:
    lines = ["<tool_calls>"]
    for name, given in calls:
        lines.append(f"<tool_call>{name}<tool_sep>")
        for key, value in given.items():
            shown = value if isinstance(value, str) else dumped(value)
            lines.append(f"<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>")
        lines.append("</tool_call>")
    return "\n".join([*lines, "</tool_calls>"])


def mimo(calls: Sequence[Call]) -> str:
    return seed_oss(calls).replace("seed:", "")


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
    return f"<|tool_call_start|>{dumped(enveloped(calls))}<|tool_call_end|>"


def nemotron(calls: Sequence[Call]) -> str:
    return f"<TOOLCALL>{dumped(enveloped(calls))}</TOOLCALL>"


def nemotron_parameters(calls: Sequence[Call]) -> str:
    return f"<TOOLCALL>{dumped(enveloped(calls, arguments='parameters'))}</TOOLCALL>"


def nemotron_4(calls: Sequence[Call]) -> str:
    return " ".join(f"<toolcall> {dumped(one)} </toolcall>" for one in enveloped(calls))


def hunyuan(calls: Sequence[Call]) -> str:
    blocks = [f"<tool_call>{name}\n```json\n{dumped(given)}\n```</tool_call>" for name, given in calls]
    return f"<tool_calls>{chr(10).join(blocks)}</tool_calls>"


def hunyuan_lines(calls: Sequence[Call]) -> str:
    return hunyuan(calls).replace("<tool_calls>", "<tool_calls>\n").replace("</tool_calls>", "\n</tool_calls>")


def hunyuan_list(calls: Sequence[Call]) -> str:
    return f"<tool_calls>{dumped(enveloped(calls))}</tool_calls>"


def apriel(calls: Sequence[Call]) -> str:
    objects = [{**one, "id": f"c{place}"} for place, one in enumerate(enveloped(calls))]
    return f"<tool_calls>[\n{(',' + chr(10)).join(map(dumped, objects))}\n]</tool_calls>"


def apertus(calls: Sequence[Call]) -> str:
    return f"<|tools_prefix|>{dumped([{name: given} for name, given in calls])}<|tools_suffix|>"


def internlm(calls: Sequence[Call]) -> str:
    objects = map(dumped, enveloped(calls, arguments="parameters"))
    return "".join(f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in objects)


def internlm_arguments(calls: Sequence[Call]) -> str:
    return "".join(f"<|action_start|> <|plugin|>\n{dumped(one)}<|action_end|>" for one in enveloped(calls))


def solar(calls: Sequence[Call]) -> str:
    blocks = [
        f"<|tool_call:begin|>a1b2c3d4e{place}<|tool_call:name|>{name}<|tool_call:args|>{dumped(given)}<|tool_call:end|>"
        for place, (name, given) in enumerate(calls)
    ]
    return f"<|tool_calls|>{''.join(blocks)}"


def xlam(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(dumped, enveloped(calls)))}]"


def plain_list(calls: Sequence[Call]) -> str:
    return dumped(enveloped(calls))


def fenced_list(calls: Sequence[Call]) -> str:
    return f"```json\n{dumped(enveloped(calls))}\n```"
