"""Points 56 to 59: log-probabilities."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance import shapes
from tests.conformance.callers import END, Caller, Way, error_of, forcing, user
from tests.conformance.servers import Server

CHAT = "/v1/chat/completions"
QUESTION = [user("Which port does the server listen on by default?")]


def test_point_56_logprobs(way: Way, server: Server) -> None:
    """Each token has its log-probability and those of the likeliest tokens; the tokens' bytes make up the text."""
    for fields in (
        {"messages": QUESTION, "temperature": 0},
        {"messages": QUESTION, "temperature": 1, "seed": 1, "max_tokens": 9},
        forcing([*server.tokens("é😀"), END]),
    ):
        response = way.chat(logprobs=True, top_logprobs=3, **fields)
        positions = response.choices[0].logprobs
        assert b"".join(bytes(one.bytes) for one in positions).decode(errors="replace") == response.text
        assert len(positions) == response.usage.completion_tokens - (response.finish_reason == "stop")
        for one in positions:
            assert one.logprob <= 0
            others = [other.logprob for other in one.top_logprobs]
            assert len(others) == 3 and others == sorted(others, reverse=True) and others[0] <= 0
            assert one.token == bytes(one.bytes).decode(errors="replace")
            assert one.logprob <= others[0]
    greedy = way.chat(messages=QUESTION, temperature=0, logprobs=True, top_logprobs=1).choices[0].logprobs
    assert [(one.token, one.logprob) for one in greedy] == [
        (one.top_logprobs[0].token, one.top_logprobs[0].logprob) for one in greedy
    ]


def test_point_57_top_logprobs(way: Way) -> None:
    """top_logprobs without logprobs gives 400, and so does 21; 0 gives none."""
    for fields in ({"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError) as failure:
            way.chat(**fields)
        assert error_of(failure.value)["param"] == "top_logprobs"
    for fields, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 20}, 20)):
        positions = way.chat(messages=QUESTION, max_tokens=3, logprobs=True, **fields).choices[0].logprobs
        assert [len(one.top_logprobs) for one in positions] == [count] * 3
    assert way.chat(messages=QUESTION, max_tokens=3).choices[0].logprobs == []


def test_point_58_streamed_logprobs(caller: Caller, server: Server) -> None:
    """Streamed log-probabilities belong to the same tokens as those of a whole response."""
    for fields in (
        {"messages": QUESTION, "temperature": 0},
        {"messages": QUESTION, "temperature": 0, "stop": "8000"},
        {"messages": QUESTION, "temperature": 1, "seed": 1, "n": 2, "max_tokens": 7},
        forcing(server.tokens("<think> because</think> F😀")),
    ):
        whole, streamed = (Way(caller, is_streamed).chat(logprobs=True, **fields) for is_streamed in (False, True))
        assert len(whole.choices) == len(streamed.choices)
        for choice, other in zip(whole.choices, streamed.choices, strict=True):
            assert [one.token for one in choice.logprobs] == [one.token for one in other.logprobs] != []
            assert [one.bytes for one in choice.logprobs] == [one.bytes for one in other.logprobs]


BANNED = {"logit_bias": {str(token_id): -100 for token_id in range(1000)}}
EXTREMES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 20, "allowed_token_ids": [5]}),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "logit_bias": {"5": 100}}),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20, **BANNED}),
    (CHAT, {"logprobs": True, "temperature": 1e-6, "top_p": 1e-9, "min_p": 1, "seed": 1}),
    (CHAT, {"logprobs": True, "repetition_penalty": 10, "presence_penalty": 2, "timings_per_token": True}),
    ("/v1/completions", {"logprobs": 20, "echo": True, "prompt_logprobs": 20, "allowed_token_ids": [5]}),
    ("/v1/completions", {"logprobs": 20, "echo": True, "max_tokens": 0, "timings_per_token": True}),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("path", "fields"), EXTREMES)
def test_point_59_no_nan(server: Server, path: str, fields: dict[str, Any], is_streamed: bool) -> None:
    """No JSON contains NaN or Infinity, however unlikely the tokens."""
    body = {"max_tokens": 3, "stream": is_streamed, **fields}
    body |= {"messages": QUESTION} if path == CHAT else {"prompt": "one two three"}
    if is_streamed:
        body.pop("prompt_logprobs", None)
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found = [response.text]
    if is_streamed:
        found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert found
    for data in found:
        assert shapes.strictly_parsed(data)["choices"]
