"""Text completions: all forms of prompts, their order, streams, log-probabilities."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from pagewick.engine.messages import PrefixMiss
from tests.fake_engine import TOKENIZER, spell
from tests.server.conftest import MODEL, Server


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hé", [TOKENIZER.encode("hé", add_special_tokens=True)]),
        (["a", "b<|im_end|>"], [TOKENIZER.encode(text, add_special_tokens=True) for text in ("a", "b<|im_end|>")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_of_all_forms(server: Server, sdk: openai.OpenAI, prompt: Any, expected: list[list[int]]) -> None:
    completion = sdk.completions.create(model=MODEL, prompt=prompt)
    assert completion.object == "text_completion" and completion.id.startswith("cmpl-")
    assert [choice.index for choice in completion.choices] == list(range(len(expected)))
    assert {choice.text for choice in completion.choices} == {"Hello 😀!"}
    assert [request.prompt_token_ids for request in server.engine_client.requests] == expected
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == sum(map(len, expected))
    assert completion.usage.completion_tokens == 12 * len(expected)


def test_choices_come_prompt_by_prompt(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.texts = ["one", "two"]
    completion = sdk.completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in completion.choices] == [
        (0, "one"),
        (1, "two"),
        (2, "one"),
        (3, "two"),
    ]


def test_sixteen_tokens_by_default(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.texts = ["x" * 40]
    choice = sdk.completions.create(model=MODEL, prompt="a").choices[0]
    assert (choice.text, choice.finish_reason) == ("x" * 16, "length")


def test_stream_of_several_prompts_and_choices(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.texts = ["one 😀", "two"]
    stream = sdk.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, list[str]] = defaultdict(list)
    *chunks, last = stream
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert "\ufffd" not in choice.text
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
    assert texts == {0: "one 😀", 1: "two", 2: "one 😀", 3: "two"}
    assert reasons == {index: ["stop"] for index in range(4)}
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == 2 * (len(spell("one 😀two")) + 2)


def test_logprobs_and_offsets(sdk: openai.OpenAI) -> None:
    logprobs = sdk.completions.create(model=MODEL, prompt="a", logprobs=2).choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None and logprobs.tokens is not None
    assert logprobs.tokens[:6] == list("Hello ")
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]
    assert logprobs.token_logprobs == [-0.25] * 11
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"H": -0.25, "</s>": -1.5}


def test_streamed_logprobs_go_on_where_the_last_chunk_ended(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "logprobs": 0, "stream": True, "stop": "😀!"})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    taken = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for one in taken for offset in one["text_offset"]] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]
    # As OpenAI defines it, the chosen token is there beside the most likely ones.
    assert taken[0]["top_logprobs"] == [{"H": -0.25}]


def test_the_end_without_text_has_empty_logprobs(server: Server, http: httpx.Client) -> None:
    server.engine_client.texts = [""]
    (choice,) = http.post("/v1/completions", json={"prompt": "a", "logprobs": 1}).json()["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", [1]], [1, "a"], [-1], [2**31], [[1], 2], [1.5], None, {"a": 1}, ["a"] * 1025]
)
def test_a_prompt_that_is_none(server: Server, http: httpx.Client, prompt: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert not server.engine_client.requests


def test_prompts_times_choices_are_limited(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["a"] * 9, "n": 128})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("prompt", ["x" * 100_000, "<|im_end|>" * 600])
def test_an_error_about_a_long_prompt_names_its_field(http: httpx.Client, prompt: str) -> None:
    error = http.post("/v1/completions", json={"prompt": prompt}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_prompt_fails_the_request_and_aborts_the_others(
    server: Server, http: httpx.Client, stream: bool
) -> None:
    body = {"prompt": ["a", "<|im_end|>" * 600], "stream": stream}
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not server.engine_client.requests


def test_best_of(server: Server, sdk: openai.OpenAI) -> None:
    server.engine_client.texts = ["bad", "best", "good"]
    server.engine_client.logprobs = [-3.0, -0.5, -1.0]
    completion = sdk.completions.create(model=MODEL, prompt=["a", "b"], n=2, best_of=3, logprobs=0)
    texts = [(choice.index, choice.text) for choice in completion.choices]
    assert texts == [(0, "best"), (1, "good"), (2, "best"), (3, "good")]
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == list("best")
    assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert [request.params.n for request in server.engine_client.requests] == [3, 3]
    # As in OpenAI's API, what is thrown away counts.
    assert completion.usage is not None and completion.usage.completion_tokens == 2 * (len("badbestgood") + 3)


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 2, "stream": True}, {"best_of": 2, "n": 3}, {"best_of": 129}, {"best_of": 0}, {"best_of": "many"}],
)
def test_best_of_that_cannot_be(server: Server, http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    assert not server.engine_client.requests


def test_candidates_are_limited_like_choices(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["a"] * 9, "best_of": 128})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_best_of_that_asks_for_nothing_streams(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "n": 2, "best_of": 2, "stream": True})
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")


def test_prompt_logprobs_stand_with_each_choice_of_the_prompt(http: httpx.Client) -> None:
    body = http.post("/v1/completions", json={"prompt": [[5, 6], [7, 8, 9]], "n": 2, "prompt_logprobs": 0}).json()
    tokens = [[list(one) if one else one for one in choice["prompt_logprobs"]] for choice in body["choices"]]
    assert tokens == [[None, ["6"]]] * 2 + [[None, ["8"], ["9"]]] * 2
    body = http.post("/v1/completions", json={"prompt": [5, 6]}).json()
    assert "prompt_logprobs" not in body["choices"][0]


def test_usage_adds_up_over_prompts(server: Server, http: httpx.Client) -> None:
    server.engine_client.extras = {"num_cached_tokens": 2, "num_draft_tokens": 7, "num_accepted_tokens": 3,
                                   "prefix_miss": PrefixMiss(2, 5, 6)}  # fmt: skip
    usage = http.post("/v1/completions", json={"prompt": [[1, 2, 3], [4, 5, 6]]}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 6
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 8
    # The position of a miss is of one prompt, so that none is told of two.
    body: dict[str, Any] = {"prompt": [[1, 2, 3], [4, 5, 6]], "cache_salt": "mine"}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    body |= {"prompt": [[1, 2, 3]], "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = http.post("/v1/completions", json=body).text.strip().split("\n\n")
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2, "prefix_miss_position": 2}
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 4
