"""More calls as families publish them; see forms.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.text.tool_calls.forms import Call, dumped, enveloped, minicpm_5, python, seed_oss


def firefunction(calls: Sequence[Call]) -> str:
    return f"functools{dumped(enveloped(calls))}"


def functionary_31(calls: Sequence[Call]) -> str:
    return "".join(f"<function={name}>{dumped(given)}</function>" for name, given in calls)


def functionary_32(calls: Sequence[Call]) -> str:
    return ">>>".join(f"{name}\n{dumped(given)}" for name, given in calls)


def minimax_m1(calls: Sequence[Call]) -> str:
    return "\n".join(["<tool_calls>", *map(dumped, enveloped(calls)), "</tool_calls>"])


def muse(calls: Sequence[Call]) -> str:
    """Calls behind `<|start|>assistant`, each in a message of its own."""
    bodies = []
    for name, given in calls:
        lines = [f" to={name}<|message|><atem:function_calls>", f'<atem:invoke name="{name}">']
        for key, value in given.items():
            shown = value if isinstance(value, str) else dumped(value)
            lines.append(f'<atem:parameter name="{key}">{shown}</atem:parameter>')
        bodies.append("\n".join([*lines, "</atem:invoke>", "</atem:function_calls>"]))
    return "<|eom|><|start|>assistant".join(bodies)


def kimi_k3(calls: Sequence[Call]) -> str:
    kinds = {bool: "boolean", type(None): "null", str: "string", dict: "object", list: "array"}
    text = "<|open|>tools<|sep|>"
    for place, (name, given) in enumerate(calls, 1):
        text += f'<|open|>call tool="{name}" index="{place}"<|sep|>'
        for key, value in given.items():
            shown = value if isinstance(value, str) else dumped(value)
            kind = kinds.get(type(value), "number")
            text += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{shown}<|close|>argument<|sep|>'
        text += "<|close|>call<|sep|>"
    return f"{text}<|close|>tools<|sep|>"


def minimax_m3(calls: Sequence[Call]) -> str:
    """The template leaves out members that are null. A model may write one."""
    mark = "]<]minimax[>["

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{mark}<{key}>{shown(one)}{mark}</{key}>" for key, one in value.items())
        if isinstance(value, list):
            return "".join(f"{mark}<item>{shown(one)}{mark}</item>" for one in value)
        return value if isinstance(value, str) else dumped(value)

    lines = [f'{mark}<invoke name="{name}">{shown(given)}{mark}</invoke>' for name, given in calls]
    return "\n".join([f"{mark}<tool_call>", *lines, f"{mark}</tool_call>"])


def lfm_25(calls: Sequence[Call]) -> str:
    """Its template puts single quotes around texts, and escapes nothing."""

    def shown(value: Any) -> str:
        return f"'{value}'" if isinstance(value, str) else dumped(value) if isinstance(value, dict) else python(value)

    listed = (f"{name}({', '.join(f'{key}={shown(one)}' for key, one in given.items())})" for name, given in calls)
    return f"<|tool_call_start|>[{', '.join(listed)}]<|tool_call_end|>"


def _nested_in_python(call: Call) -> Call:
    """Return a call whose lists and objects are texts, as Jinja prints them."""

    def shown(value: Any) -> Any:
        return python(value) if isinstance(value, list | dict) else value

    return call[0], {key: shown(value) for key, value in call[1].items()}


def seed_oss_python(calls: Sequence[Call]) -> str:
    return seed_oss([_nested_in_python(call) for call in calls])


def minicpm_5_python(calls: Sequence[Call]) -> str:
    return minicpm_5([_nested_in_python(call) for call in calls])
