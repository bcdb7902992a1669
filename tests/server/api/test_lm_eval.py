"""Requests of lm-eval's local-completions, compared with transformers, with the built-in model in float32."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
import transformers

from pagewick.weights.hub import resolve_model

READY = re.compile(r"ready on (http://\S+)")
# Contexts and what is asked of them: how likely it is, and whether it is what the model would say.
TASKS = [("The server listens on", " port 8000"), ("Pagewick", " x é 😀"), ("a", " the")]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--dtype", "float32", "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        address = next(match[1] for line in stdout if (match := READY.search(line)))
        with httpx.Client(base_url=address, timeout=60) as client:
            yield client
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def tokens(http: httpx.Client, text: str) -> list[int]:
    token_ids: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return token_ids


def what_it_says(http: httpx.Client, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    token_ids: list[int] = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    return token_ids


def reference(num_context: int, token_ids: list[int]) -> tuple[float, bool]:
    """Return these two results from transformers."""
    path = resolve_model("pagewick-demo")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)[num_context - 1 : -1]
    wanted = torch.tensor(token_ids[num_context:])
    return float(logprobs.gather(-1, wanted[:, None]).sum()), bool((logprobs.argmax(-1) == wanted).all())


def read_as_lm_eval_does(choice: Any, num_context: int) -> tuple[float, bool]:
    """The sum of the continuation's log-probabilities, and whether each of its tokens was the likeliest.

    The last position is that of the one token that was generated, which is not looked at.
    """
    logprobs = choice["logprobs"]
    given = logprobs["token_logprobs"][num_context:-1]
    named = zip(logprobs["tokens"][num_context:-1], logprobs["top_logprobs"][num_context:-1], strict=True)
    return sum(given), all(token == max(top, key=lambda name: top[name]) for token, top in named)


def test_continuations_are_as_likely_as_transformers_has_them(http: httpx.Client) -> None:
    pairs = [(tokens(http, context), tokens(http, context + rest)) for context, rest in TASKS]
    assert all(whole[: len(context)] == context for context, whole in pairs)
    pairs.append((pairs[0][0], pairs[0][0] + what_it_says(http, pairs[0][0])))
    body = {
        "model": "pagewick-demo", "prompt": [whole for _, whole in pairs], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    found = [read_as_lm_eval_does(choice, len(context)) for (context, _), choice in zip(pairs, choices, strict=True)]
    expected = [reference(len(context), whole) for context, whole in pairs]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=2e-3)
    assert [one[1] for one in found] == [one[1] for one in expected]
    assert not found[1][1] and found[3][1]


def test_nothing_need_be_generated(http: httpx.Client) -> None:
    whole = tokens(http, "The server listens on port 8000 by default.")
    body = {"prompt": whole, "logprobs": 2, "echo": True, "temperature": 0}
    alone, beside = (
        http.post("/v1/completions", json={**body, "max_tokens": count}).json()["choices"][0] for count in (0, 1)
    )
    assert alone["finish_reason"] == "length" and len(alone["logprobs"]["tokens"]) == len(whole)
    for name, values in alone["logprobs"].items():
        if name == "token_logprobs":
            assert values[1:] == pytest.approx(beside["logprobs"][name][1:-1], abs=1e-4)
        elif name != "top_logprobs":
            assert values == beside["logprobs"][name][:-1]
