"""Points 75, 76, 79 and 80: completions, models, and tokens without the model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.conformance import shapes
from tests.conformance.callers import Caller, Way, error_of, user
from tests.conformance.servers import MODEL, SECOND_NAME, Server

COMPLETIONS = "/v1/completions"
TEXT = "The default port of the server is 8000."


def test_point_75_four_forms_of_a_prompt(way: Way, server: Server) -> None:
    """A prompt is a text, texts, token ids or lists of token ids; choices come prompt by prompt."""
    texts = [TEXT, "One two three", "Hello"]
    token_ids = [server.tokens(text) for text in texts]
    fields = {"max_tokens": 5, "temperature": 0}
    alone = [way.completion(prompt=text, **fields).text for text in texts]
    assert len(set(alone)) == 3
    assert [way.completion(prompt=one, **fields).text for one in token_ids] == alone
    for prompts in (texts, token_ids):
        response = way.completion(prompt=prompts, **fields)
        assert [choice.text for choice in response.choices] == alone
        assert response.usage.prompt_tokens == sum(len(one) for one in token_ids)
        several = way.completion(prompt=prompts, n=2, **fields)
        assert [choice.text for choice in several.choices] == [text for text in alone for _ in range(2)]
    wrong_prompts: list[Any] = [[], [[]], [TEXT, [5]], [5, TEXT], [[5], 5], [-1], [[4096]], "", [""]]
    for wrong in wrong_prompts:
        with pytest.raises(openai.BadRequestError) as failure:
            way.completion(prompt=wrong)
        assert error_of(failure.value)["param"] == "prompt", wrong


def test_point_75_shape(server: Server) -> None:
    """A completion, and every chunk of a stream, has the shape of OpenAI's specification."""
    for fields in ({}, {"logprobs": 2, "echo": True, "n": 2}, {"max_tokens": 0}, {"stop": "e"}):
        body = {"model": MODEL, "prompt": TEXT, "max_tokens": 6, **fields}
        shapes.check_completion(server.http.post(COMPLETIONS, json=body).content)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = server.http.post(COMPLETIONS, json=body).text.split("\n\n")
        chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert lines[-2:] == ["data: [DONE]", ""] and len(chunks) >= 2
        for chunk in chunks:
            shapes.check_completion(chunk)


def test_point_75_default_max_tokens(way: Way) -> None:
    """Without max_tokens 16 tokens are generated."""
    response = way.completion(prompt=TEXT, extra_body={"ignore_eos": True})
    assert (response.usage.completion_tokens, response.finish_reason) == (16, "length")


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_point_75_scores_of_an_evaluation(caller: Caller, server: Server, max_tokens: int) -> None:
    """Batches of token ids with echo and logprobs, as lm-eval sends them, give the scores of those tokens."""
    context = server.tokens("The default port of the server is")
    said = caller.completion(prompt=context, max_tokens=2, temperature=0, extra_body={"return_token_ids": True})
    greedy = said.choices[0].token_ids
    other = server.tokens(" a b c d")
    assert len(greedy) == 2 and other[:2] != greedy
    response = caller.completion(
        prompt=[context + greedy, context + other], max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1
    )
    found = []
    for choice in sorted(response.choices, key=lambda choice: choice.index):
        logprobs = choice.logprobs
        end = len(logprobs.token_logprobs) - max_tokens
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        scores = logprobs.token_logprobs[len(context) : end]
        is_greedy = all(
            max(top, key=lambda token: top[token]) == token
            for token, top in zip(
                logprobs.tokens[len(context) : end], logprobs.top_logprobs[len(context) : end], strict=True
            )
        )
        found.append((sum(scores), len(scores), is_greedy))
    assert [(count, is_greedy) for _, count, is_greedy in found] == [(2, True), (len(other), False)]
    assert found[1][0] < found[0][0] < 0


def test_point_76_text_offsets(way: Way) -> None:
    """Each token is in the text at its offset; the token that ends the text is at its end."""
    for fields in (
        {"prompt": TEXT, "echo": True, "max_tokens": 5},
        {"prompt": "The default port of the server is", "max_tokens": 4, "temperature": 0},
        {"prompt": [TEXT, "Hello world"], "echo": True, "n": 2, "max_tokens": 2},
        {"prompt": "ß😀é, ok", "echo": True, "max_tokens": 0},
    ):
        response = way.completion(logprobs=1, **fields)
        for choice in response.choices:
            tokens = [token for one in choice.logprobs for token in one.tokens]
            offsets = [offset for one in choice.logprobs for offset in one.text_offset]
            assert len(tokens) == len(offsets) > 0 and offsets == sorted(offsets) and offsets[0] == 0
            for token, start, end in zip(tokens, offsets, [*offsets[1:], len(choice.text)], strict=True):
                if start == len(choice.text):
                    assert token == "<|im_end|>" and choice.finish_reason == "stop"
                elif "\ufffd" not in token:
                    assert choice.text[start:end] == token


def test_point_79_models(caller: Caller, server: Server) -> None:
    """Models are listed and found under their names, those with slashes too; an unknown one gives 404."""
    assert [model.id for model in caller.models()] == [MODEL, SECOND_NAME]
    for name in (MODEL, SECOND_NAME):
        model = caller.model(name)
        assert (model.id, model.object) == (name, "model") and type(model.created) is int
        assert model.max_model_len == 2048
        shapes.check_model(server.http.get(f"/v1/models/{name}").json())
    assert server.http.get("/v1/models").json()["object"] == "list"
    for name in ("none", "org", "org/none", "org/pagewick-demo/x"):
        with pytest.raises(openai.NotFoundError) as failure:
            caller.model(name)
        assert error_of(failure.value)["code"] == "model_not_found"


@pytest.mark.parametrize("text", ["Hello world", "", "ß😀é 日本\r\n\t ok  ", "<|im_end|>", TEXT * 20])
def test_point_80_tokens_and_back(server: Server, text: str) -> None:
    """A text comes back from its tokens, in vLLM's form and in llama.cpp's; count is their number."""
    for name, more in (("prompt", {"add_special_tokens": False}), ("content", {}), ("content", {"add_special": False})):
        response = server.http.post("/tokenize", json={name: text, **more}).json()
        assert response["count"] == len(response["tokens"]) and response["max_model_len"] == 2048
        back = server.http.post("/detokenize", json={"tokens": response["tokens"]}).json()
        assert back["prompt"] == back["content"] == text
    strings = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert len(strings["token_strs"]) == strings["count"]
    pieces = server.http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    raw = [piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces]
    assert b"".join(raw).decode() == text


def test_point_80_messages(caller: Caller, server: Server) -> None:
    """/tokenize gives messages the tokens of their chat completion; /apply-template gives the template's text."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Hello."},
        user("Which port?"),
    ]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    made = caller.chat(messages=messages, max_tokens=1, extra_body={"return_token_ids": True})
    assert tokens == made.prompt_token_ids  # type: ignore[attr-defined]
    prompt = server.http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == prompt
    assert prompt.index("Be brief.") < prompt.index("Hello.") < prompt.index("Which port?")
    without = server.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert without["tokens"] == tokens[: without["count"]] and without["count"] < len(tokens)


@pytest.mark.parametrize("tokens", ["x", [1.5], [-1], [4096], [True], None, [[1]], [2**70]])
def test_point_80_wrong_tokens(server: Server, tokens: Any) -> None:
    """Anything but valid token ids gives 400."""
    response = server.http.post("/detokenize", content=json.dumps({"tokens": tokens}))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")
