"""Sampling, scheduling and the prefix cache through the real server with the built-in model, as HTTP shows them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

READY = re.compile(r"ready on (http://\S+)")
QUESTION = [{"role": "user", "content": "Which port does the server listen on by default?"}]
MAX_NUM_SEQS = 4
MAX_WAITING = 3
BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags = {"max-num-seqs": MAX_NUM_SEQS, "max-waiting-requests": MAX_WAITING, "block-size": BLOCK_SIZE}
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--speculative-method", "ngram", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        address = next(match[1] for line in stdout if (match := READY.search(line)))
        with httpx.Client(base_url=address, timeout=60) as client:
            yield client
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def chat(http: httpx.Client, **fields: Any) -> Any:
    response = http.post("/v1/chat/completions", json={"messages": QUESTION, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def complete(http: httpx.Client, prompt: Any, **fields: Any) -> Any:
    response = http.post("/v1/completions", json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


def prompt_ids(http: httpx.Client, text: str) -> list[tuple[int, str]]:
    """Return all tokens of a text but the first, with their spelling, as the server reports them."""
    (choice,) = complete(http, text, max_tokens=1, prompt_logprobs=0)["choices"]
    return [
        (int(key), one["decoded_token"]) for position in choice["prompt_logprobs"][1:] for key, one in position.items()
    ]


def test_a_bad_word_does_not_come(http: httpx.Client) -> None:
    (usual,) = texts(chat(http))
    (changed,) = texts(chat(http, bad_words=["8000"]))
    assert "8000" in usual and "8000" not in changed


def test_allowed_tokens_and_bias_decide(http: httpx.Client) -> None:
    token_id, text = prompt_ids(http, "the server and its port")[-1]
    assert texts(complete(http, "the", allowed_token_ids=[token_id], max_tokens=3)) == [text * 3]
    assert texts(complete(http, "the", logit_bias={str(token_id): 100}, max_tokens=2, temperature=0)) == [text * 2]


def test_choices_do_not_depend_on_their_number(http: httpx.Client) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 2, "seed": 11}
    three = texts(complete(http, "A", n=3, **options))
    assert texts(complete(http, "A", **options)) == three[:1]
    assert texts(complete(http, "A", n=2, **options)) == three[:2]
    assert len(set(three)) > 1
    # A choice that a stop string ends leaves the others as they are.
    stop = three[0][2:5]
    stopped = texts(complete(http, "A", n=3, stop=stop, **options))
    assert stopped == [text.split(stop)[0] for text in three]


def test_best_of_is_the_best_of_all_choices(http: httpx.Client) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "seed": 5, "logprobs": 0, "ignore_eos": True}
    choices = complete(http, "The default", n=5, **options)["choices"]

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    assert all(choice["finish_reason"] == "length" for choice in choices)
    expected = [choice["text"] for choice in sorted(choices, key=mean, reverse=True)]
    assert len(set(expected)) > 2
    answer = complete(http, "The default", n=2, best_of=5, **options)
    assert texts(answer) == expected[:2]
    assert answer["usage"]["completion_tokens"] == 5 * 8


@pytest.mark.parametrize("stream", [False, True])
def test_beams(http: httpx.Client, stream: bool) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 30}
    whole = texts(chat(http, **fields))
    assert "8000" in whole[0] and len(set(whole)) == 3
    if stream:
        body = {"messages": QUESTION, "stream": True, **fields}
        lines = http.post("/v1/chat/completions", json=body).text.splitlines()
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        contents = {choice["index"]: choice["delta"]["content"] for choice in choices if choice["delta"].get("content")}
        assert [contents[index] for index in range(3)] == whole


def test_the_usage_shows_what_the_prefix_cache_knew(http: httpx.Client) -> None:
    prompt = [token_id for token_id, _ in prompt_ids(http, "Pagewick serves models. " * 60)][:110]
    other = [*prompt[:70], *(token_id + 1 for token_id in prompt[70:])]

    def details(token_ids: list[int], **fields: Any) -> dict[str, int]:
        usage = complete(http, token_ids, max_tokens=1, **fields)["usage"]
        found: dict[str, int] = usage["prompt_tokens_details"]
        return found

    assert details(prompt, cache_salt="mine")["cached_tokens"] == 0
    assert details(prompt, cache_salt="mine") == {"cached_tokens": 3 * BLOCK_SIZE}
    assert details(other, cache_salt="mine") == {"cached_tokens": 2 * BLOCK_SIZE, "prefix_miss_position": 70}
    # A client that does not know the salt learns nothing about it.
    assert details(other, cache_salt="yours") == {"cached_tokens": 0, "prefix_miss_position": 0}
    # Nor, of what all share, where exactly somebody else's prompt goes on in another way.
    assert details(prompt) == {"cached_tokens": 0}
    assert details(other) == {"cached_tokens": 2 * BLOCK_SIZE}


def test_draft_tokens_are_counted(http: httpx.Client) -> None:
    answer = complete(http, "one two three one two three one two", max_tokens=64, temperature=0, ignore_eos=True)
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    metrics = http.get("/metrics").text
    assert re.search(r"^vllm:spec_decode_num_draft_tokens_total\S* [1-9]", metrics, re.MULTILINE)


def test_a_session_is_kept(http: httpx.Client) -> None:
    chat(http, session_id="somebody", max_tokens=2)
    assert re.search(r"^pagewick:sessions\S* 1\.0$", http.get("/metrics").text, re.MULTILINE)


def test_a_deadline(http: httpx.Client) -> None:
    """The request needs more than half a second: all choices fill the context, without any draft tokens."""
    body = {"messages": QUESTION, "ignore_eos": True, "n": MAX_NUM_SEQS, "temperature": 2, "logprobs": True}
    body["top_logprobs"] = 20
    response = http.post("/v1/chat/completions", json={**body, "timeout": 1e-9, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    response = http.post("/v1/chat/completions", json={**body, "timeout": 0.5, "stream": True})
    assert response.status_code == 200
    *_, last = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(last[6:])["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue(http: httpx.Client, stream: bool) -> None:
    """With one prompt too many, none of them is served and none stays in the queue."""
    body = {"prompt": ["a"] * (MAX_NUM_SEQS + MAX_WAITING + 1), "max_tokens": 200, "ignore_eos": True, "stream": stream}
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1
    assert "8000" in texts(chat(http))[0]
    metrics = http.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "pagewick:kv_blocks_leaked"):
        assert re.search(rf"^{name}\S* 0\.0$", metrics, re.MULTILINE), name


def test_a_request_may_have_more_inputs_than_may_wait(http: httpx.Client) -> None:
    inputs = [f"text number {number}" for number in range(4 * (MAX_WAITING + MAX_NUM_SEQS))]
    response = http.post("/v1/embeddings", json={"input": inputs})
    assert response.status_code == 200, response.text
    vectors = [tuple(one["embedding"]) for one in response.json()["data"]]
    assert len(set(vectors)) == len(inputs)
    (alone,) = http.post("/v1/embeddings", json={"input": inputs[-1]}).json()["data"]
    assert tuple(alone["embedding"]) == vectors[-1]
