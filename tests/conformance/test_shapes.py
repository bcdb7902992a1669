"""The checks of shapes find what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance import shapes


def good() -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "x", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def test_a_right_shape_passes() -> None:
    shapes.check_chat(json.dumps(good()))


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (["created"], 1.5, "created is not of type int"),
        (["created"], True, "created is not of type int"),
        (["object"], "text_completion.chunk", "object is 'text_completion.chunk'"),
        (["extra"], 1, "extra does not belong to the API"),
        (["usage"], None, "usage"),
        (["usage", "prompt_tokens"], "1", "prompt_tokens is not of type int"),
        (["choices", 0, "finish_reason"], "eos", "finish_reason is 'eos'"),
        (["choices", 0, "index"], None, "index is not of type int"),
        (["choices", 0, "message", "role"], "user", "role is 'user'"),
        (["choices", 0, "message", "tool_calls"], None, "tool_calls should be left out"),
        (["choices", 0, "logprobs"], {"content": [{"token": "x"}]}, "logprob is missing"),
        (["choices"], {}, "choices is not a list"),
    ],
)
def test_wrong_values_are_found(path: list[Any], value: Any, fault: str) -> None:
    body = good()
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(AssertionError, match=fault):
        shapes.check_chat(json.dumps(body))


@pytest.mark.parametrize("path", [["id"], ["usage"], ["choices", 0, "logprobs"], ["choices", 0, "message", "refusal"]])
def test_missing_keys_are_found(path: list[Any]) -> None:
    body = good()
    place: Any = body
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    with pytest.raises(AssertionError, match=f"{path[-1]} is missing"):
        shapes.check_chat(json.dumps(body))


@pytest.mark.parametrize("text", ["[NaN]", "[Infinity]", "[-Infinity]"])
def test_json_that_only_python_accepts_is_found(text: str) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        shapes.strictly_parsed(text)
