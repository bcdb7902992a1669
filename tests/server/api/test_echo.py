"""Echoed prompts with and without log-probabilities, infilling, and prompts given as tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewick.engine.messages import EngineRequest, RequestDelta, TokenLogprobs
from pagewick.outputs import Logprob
from pagewick.server.api.logprobs import EchoedPrompt
from pagewick.text.tokenizer import Tokenizer
from tests.fake_engine import END, MAX_MODEL_LEN, TOKENIZER, FakeClient, spell
from tests.server.api_routes import CHAT, HELLO, Api, error_of, events_of
from tests.tiny_text import sentencepiece_backend

COMPLETIONS = "/v1/completions"
Z = spell("z")[0]


class PromptClient(FakeClient):
    """Reports for each prompt token t that z was likeliest, then t, then the end token."""

    async def _deltas(self, request: EngineRequest, unfinished: set[int]) -> AsyncGenerator[RequestDelta]:
        known = None
        if (wanted := request.params.prompt_logprobs) is not None:
            known = [
                TokenLogprobs(one, -2.0, 2, [(Z, -0.5), (one, -2.0), (END, -3.0)][:wanted])
                for one in request.prompt_token_ids[1:]
            ]
            # The prompt is computed in two steps.
            half = len(known) // 2
            yield RequestDelta(request_id=request.request_id, prompt_logprobs=known[:half])
            known = known[half:]
        if request.params.max_tokens == 0:
            for index in sorted(unfinished):
                told = known if index == 0 else None
                yield RequestDelta(
                    request_id=request.request_id, choice_index=index, prompt_logprobs=told, finish_reason="length"
                )
            return
        async for delta in super()._deltas(request, unfinished):
            delta.prompt_logprobs, known = known, None
            yield delta


def echo_api() -> Api:
    api = Api()
    api.client = PromptClient()
    return api


def complete(**fields: Any) -> Any:
    response = echo_api().post(COMPLETIONS, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(**fields: Any) -> dict[int, dict[str, Any]]:
    """Join the chunks of every choice."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": defaultdict(list)})
    for event in events_of(echo_api().post(COMPLETIONS, stream=True, **fields)):
        for choice in event["choices"]:
            whole = choices[choice["index"]]
            whole["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"][name] += values
            for name in ("finish_reason", "token_ids", "prompt_token_ids"):
                if isinstance(choice.get(name), list):
                    whole[name] = (whole.get(name) or []) + choice[name]
                else:
                    whole[name] = choice.get(name) or whole.get(name)
    return choices


@pytest.mark.parametrize(
    ("prompt", "text"), [("Well, é", "Well, é"), (spell("ab"), "ab"), ([spell("a"), spell("cé")], ("a", "cé"))]
)
def test_the_text_begins_with_the_prompt(prompt: Any, text: Any) -> None:
    expected = [f"{one}Hello 😀!" for one in ([text] if isinstance(text, str) else text) for _ in range(2)]
    body = complete(prompt=prompt, echo=True, n=2)
    assert [choice["text"] for choice in body["choices"]] == expected
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert [choice["text"] for _, choice in sorted(streamed(prompt=prompt, echo=True, n=2).items())] == expected


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_logprobs_go_over_prompt_and_completion(max_tokens: int, n: int) -> None:
    prompts = [spell("xyé"), spell("a")]
    body = complete(prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, n=n)
    assert [choice["index"] for choice in body["choices"]] == [*range(2 * n)]
    for choice in body["choices"]:
        prompt = prompts[choice["index"] // n]
        new = spell("Hello")[:max_tokens]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None] + [-2.0] * (len(prompt) - 1) + [-0.25] * max_tokens
        names = [TOKENIZER.token_bytes(one).decode(errors="replace") for one in [*prompt, *new]]
        assert logprobs["tokens"] == names
        told = [{"z": -0.5, name: -2.0} for name in names[1 : len(prompt)]]
        assert logprobs["top_logprobs"] == [None, *told, *({name: -0.25} for name in "Hello"[:max_tokens])]
        assert choice["finish_reason"] == "length"
        starts = [*logprobs["text_offset"], len(choice["text"])]
        pieces = [choice["text"][first:last] for first, last in pairwise(starts)]
        whole = [one for one in zip(names, pieces, strict=True) if "\ufffd" not in one[0]]
        assert all(name == piece for name, piece in whole) and "".join(pieces) == choice["text"]
    assert body["usage"]["prompt_tokens"] == 5 and body["usage"]["completion_tokens"] == 2 * n * max_tokens


@pytest.mark.parametrize("text", ["", "no"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_generated_text_has_one_position_per_token(text: str, is_streamed: bool) -> None:
    """Clients that score a prompt drop one position per generated token; here the last one is the end token."""
    api, prompt = echo_api(), spell("xyz")
    api.client.texts = [text]
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 9, "stream": is_streamed}
    response = api.post(COMPLETIONS, **fields)
    answers = events_of(response) if is_streamed else [response.json()]
    parts = [choice["logprobs"] for answer in answers for choice in answer["choices"] if choice["logprobs"]]
    whole = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    assert whole["tokens"] == [*"xyz", *text, "</s>"]
    assert whole["token_logprobs"] == [None, -2.0, -2.0] + [-0.25] * (len(text) + 1)
    assert whole["top_logprobs"][3:] == [*({one: -0.25, "</s>": -1.5} for one in text), {"</s>": -0.25}]
    assert whole["text_offset"] == [*range(3 + len(text) + 1)]


@pytest.mark.parametrize("max_tokens", [0, 2, 20])
def test_a_stream_joined_equals_the_whole_response(max_tokens: int) -> None:
    fields = {
        "prompt": ["ab", "cd é"], "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2,
        "return_token_ids": True,
    }  # fmt: skip
    whole = complete(**fields)["choices"]
    joined = streamed(**fields)
    assert len(joined) == len(whole) == 4
    for choice in whole:
        other = joined[choice["index"]]
        for name in ("text", "logprobs", "finish_reason", "prompt_token_ids"):
            assert other[name] == choice[name]
        assert (other["token_ids"] or []) == choice["token_ids"]


def test_prompt_logprobs_beside_an_echo_are_as_many_as_were_asked_for() -> None:
    (choice,) = complete(prompt=spell("ab"), echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {"z": -0.5, "b": -2.0}
    assert sorted(choice["prompt_logprobs"][1]) == sorted(map(str, (Z, END, spell("b")[0])))
    (choice,) = complete(prompt=spell("ab"), echo=True, logprobs=1)["choices"]
    assert "prompt_logprobs" not in choice
    (choice,) = complete(prompt=spell("ab"), echo=True)["choices"]
    assert choice["logprobs"] is None and "prompt_logprobs" not in choice


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=24))
def test_offsets_of_any_text(text: str) -> None:
    sentencepiece = Tokenizer(sentencepiece_backend(), config={"bos_token": "<s>", "add_bos_token": True})
    for tokenizer in (TOKENIZER, sentencepiece):
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        echoed = EchoedPrompt.of(tokenizer, token_ids, text)
        if tokenizer is TOKENIZER:
            assert echoed.text == text
        offsets = [*echoed.offsets, len(echoed.text)]
        assert offsets == sorted(offsets) and offsets[0] == 0 and len(echoed.offsets) == len(token_ids)
        raw = echoed.text.encode()
        for token_id, first, last in zip(token_ids, offsets, offsets[1:], strict=False):
            # The text of a token is what lies between its offset and the next, unless it was added around the text.
            piece = tokenizer.token_bytes(token_id)
            assert echoed.text[first:last].encode() in raw
            if piece.isascii() and token_id not in tokenizer.special_token_ids:
                assert piece.decode().lstrip(" ") == echoed.text[first:last].lstrip(" ")


def test_tokens_around_a_text_take_none_of_it() -> None:
    tokenizer = Tokenizer(sentencepiece_backend(), config={"bos_token": "<s>", "add_bos_token": True})
    token_ids = tokenizer.encode("ab", add_special_tokens=True)
    echoed = EchoedPrompt.of(tokenizer, token_ids, "ab")
    assert echoed.text == "ab" and echoed.offsets[:2] == [0, 0]
    # Given as tokens, it is what the model reads.
    assert EchoedPrompt.of(tokenizer, token_ids, None).text.startswith("<s>")


def test_of_tokens_with_one_text_the_likelier_is_told() -> None:
    first, second = 300, 301
    position = {first: Logprob(-3.0, 2, "x"), second: Logprob(-1.0, 1, "x")}

    class Same(Tokenizer):
        def __init__(self) -> None:
            pass

        def token_bytes(self, token_id: int) -> bytes:
            return b"x"

    prompt = EchoedPrompt("xx", [second, first], [0, 1])
    logprobs = prompt.logprobs(Same(), [None, position], 2)
    assert logprobs.token_logprobs == [None, -3.0] and logprobs.top_logprobs == [None, {"x": -1.0}]


def test_a_chat_echoes_what_the_model_is_to_go_on_from() -> None:
    api = Api()
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    fields: dict[str, Any] = {"messages": begun, "continue_final_message": True, "echo": True}
    assert api.chat(**fields).json()["choices"][0]["message"]["content"] == "Well, Hello 😀!"
    assert api.prompt.endswith("Well, ")
    deltas = [event["choices"][0]["delta"] for event in api.chat_events(**fields)]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "Well, "}]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well, Hello 😀!"
    # A user's message is no part of the answer.
    assert api.chat(echo=True).json()["choices"][0]["message"]["content"] == "Hello 😀!"


def test_token_ids() -> None:
    api = Api()
    body = api.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == api.client.requests[0].prompt_token_ids
    assert body["choices"][0]["token_ids"] == [*spell("Hello 😀!"), END]
    events = api.chat_events(return_token_ids=True)
    assert events[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in events[1:])
    told = [one for event in events for one in event["choices"][0].get("token_ids", [])]
    assert told == body["choices"][0]["token_ids"]
    assert "token_ids" not in str(api.chat().json()) + str(api.chat_events())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": spell("abcdef"), "truncate_prompt_tokens": 2}, spell("ef")),
        ({"prompt": spell("abcdef"), "truncate_prompt_tokens": 20}, spell("abcdef")),
        ({"prompt": "abcdef", "truncate_prompt_tokens": 3}, TOKENIZER.encode("abcdef", add_special_tokens=False)[-3:]),
        (
            {"prompt": spell("x") * 2 * MAX_MODEL_LEN, "truncate_prompt_tokens": -1, "max_tokens": 12},
            spell("x") * (MAX_MODEL_LEN - 12),
        ),
    ],
)
def test_prompts_that_are_cut_keep_their_end(fields: dict[str, Any], expected: list[int]) -> None:
    api = Api()
    response = api.post(COMPLETIONS, echo=True, **fields)
    assert response.status_code == 200, response.text
    assert api.client.requests[0].prompt_token_ids == expected
    shown = response.json()["choices"][0]["text"].removesuffix("Hello 😀!")
    assert shown == TOKENIZER.decode(expected, skip_special_tokens=False)


def test_a_chat_that_is_cut() -> None:
    api = Api()
    assert api.chat(truncate_prompt_tokens=4).status_code == 200
    whole = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert api.client.requests[0].prompt_token_ids == whole[-4:]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "def f(", "suffix": "return"}, "suffix"),
        (COMPLETIONS, {"prompt": spell("def"), "suffix": "return"}, "suffix"),
        (COMPLETIONS, {"prompt": "def", "suffix": "x", "echo": True}, "suffix"),
        (COMPLETIONS, {"prompt": "def", "suffix": "x", "truncate_prompt_tokens": 1}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
        (CHAT, {"messages": HELLO, "suffix": "x"}, "suffix"),
        (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_is_refused(path: str, fields: dict[str, Any], param: str) -> None:
    api = Api()
    assert error_of(api.post(path, **fields))["param"] == param
    assert not api.client.requests


def test_infilling_asks_the_model_for_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def encode_infill(self: object, prefix: str, suffix: str, **more: object) -> list[int]:
        return spell(f"P{prefix}S{suffix}M")

    monkeypatch.setattr("pagewick.async_llm.AsyncEngine.encode_infill", encode_infill)
    api = Api()
    assert api.post(COMPLETIONS, prompt="a", suffix="b").json()["choices"][0]["text"] == "Hello 😀!"
    assert api.client.requests[0].prompt_token_ids == spell("PaSbM")
