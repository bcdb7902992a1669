"""llama.cpp's own routes: what requests become, and how responses, events and errors are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewick import __version__
from pagewick.engine.messages import EngineStats
from pagewick.server.api.llama_cpp.dialect import LlamaCppApi
from pagewick.server.api.llama_cpp.fields import selected
from pagewick.server.api.openai import OpenAIApi
from pagewick.text.infill import OtherFile
from tests.conformance.servers import Server
from tests.fake_engine import MAX_MODEL_LEN, TOKENIZER
from tests.server.api.other_dialect import Served
from tests.tiny_text import QWEN_TEMPLATE

HELLO = TOKENIZER.encode("hi", add_special_tokens=True)


class Api(Served):
    dialects = (OpenAIApi, LlamaCppApi)

    def __init__(self, *texts: str, **options: Any) -> None:
        super().__init__(**options)
        self.client.texts = texts or ("Hello 😀!",)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/completion", **{"prompt": "hi", **fields})


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    pieces = [line for line in response.text.split("\n\n") if line]
    assert all(piece.startswith("data: ") for piece in pieces)
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def test_a_response_says_all_that_llama_cpp_says() -> None:
    api = Api()
    body = ok(api.complete(n_predict=32, temperature=0.5, top_k=20, repeat_penalty=1.2, seed=7))
    assert (body["content"], body["stop"], body["index"], body["model"]) == ("Hello 😀!", True, 0, "org/fake-model")
    assert (body["stop_type"], body["stopping_word"], body["truncated"]) == ("eos", "", False)
    assert (body["tokens"], body["has_new_line"], body["id_slot"]) == ([], False, -1)
    assert body["prompt"] == TOKENIZER.decode(HELLO, skip_special_tokens=False)
    assert body["tokens_evaluated"] == len(HELLO) and body["tokens_cached"] == 0
    # The end token counts, as it was generated.
    assert body["tokens_predicted"] == len("Hello 😀!".encode()) + 1 == body["timings"]["predicted_n"]
    settings = body["generation_settings"]
    wanted = {
        "n_predict": 32,
        "temperature": 0.5,
        "top_k": 20,
        "repeat_penalty": 1.2,
        "seed": 7,
        "n_ctx": MAX_MODEL_LEN,
    }
    assert {name: settings[name] for name in wanted} == wanted
    params = api.client.requests[0].params
    assert (params.max_tokens, params.temperature, params.repetition_penalty) == (32, 0.5, 1.2)


def test_without_a_limit_the_context_is_the_limit() -> None:
    api = Api()
    for fields in ({}, {"n_predict": -1}, {"seed": -1}):
        ok(api.complete(**fields))
    assert [one.params.max_tokens for one in api.client.requests] == [None] * 3
    # A limit above the context is no error here.
    ok(api.complete(n_predict=MAX_MODEL_LEN * 2))
    assert api.client.requests[-1].options.lowers_max_tokens


@pytest.mark.parametrize(
    ("text", "fields", "found"),
    [
        ("one two", {"n_predict": 3}, {"stop_type": "limit", "content": "one", "truncated": False}),
        ("one\ntwo", {"stop": ["tw"]}, {"stop_type": "word", "stopping_word": "tw", "has_new_line": True}),
        ("one", {"return_tokens": True}, {"tokens": [*TOKENIZER.encode("one", add_special_tokens=False)]}),
    ],
)
def test_why_it_ends(text: str, fields: dict[str, Any], found: dict[str, Any]) -> None:
    body = ok(Api(text).complete(**fields))
    if "tokens" in found:
        assert TOKENIZER.decode(body["tokens"], skip_special_tokens=True) == "one"
        return
    assert {name: body[name] for name in found} == found


def test_a_stream_has_pieces_and_an_end() -> None:
    *pieces, last = events_of(Api().complete(stream=True, timings_per_token=True, n_predict=20))
    assert "".join(one["content"] for one in pieces) == "Hello 😀!"
    assert not any(one["stop"] for one in pieces) and all(one["tokens"] for one in pieces)
    assert [one["tokens_predicted"] for one in pieces] == list(range(1, len(pieces) + 1))
    assert all("timings" in one and "generation_settings" not in one for one in pieces)
    assert (last["stop"], last["content"], last["stop_type"], last["tokens"]) == (True, "", "eos", [])
    assert last["prompt"] and last["generation_settings"]["n_predict"] == 20


@pytest.mark.parametrize("is_stream", [True, False])
def test_several_prompts_and_responses(is_stream: bool) -> None:
    api = Api("a", "bc")
    response = api.complete(prompt=["hi", HELLO], n_cmpl=2, stream=is_stream)
    if not is_stream:
        found = ok(response)
        assert [(one["index"], one["content"]) for one in found] == [(0, "a"), (1, "bc"), (2, "a"), (3, "bc")]
        assert ok(api.complete(prompt=["hi"]))[0]["content"] == "a"
        assert ok(api.complete(prompt=HELLO))["content"] == "a"
        return
    texts = {}
    for event in events_of(response):
        texts[event["index"]] = texts.get(event["index"], "") + event["content"]
    assert texts == {0: "a", 1: "bc", 2: "a", 3: "bc"}


def test_probabilities() -> None:
    body = ok(Api("ab").complete(n_probs=2))
    first = body["completion_probabilities"][0]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -0.25)
    assert all(set(one) == {"token", "bytes", "logprob"} for one in first["top_logprobs"])
    pieces = events_of(Api("ab").complete(n_probs=2, stream=True))
    assert [one["token"] for piece in pieces for one in piece.get("completion_probabilities", [])][:2] == ["a", "b"]


def test_chosen_fields() -> None:
    fields = ["content", "generation_settings/n_predict", "timings", "no_such", "content/x"]
    body = ok(Api("ab").complete(response_fields=fields, n_predict=9))
    assert set(body) == {"content", "n_predict", "timings"} and body["n_predict"] == 9
    assert selected({"a": {"b": 0}}, ["a/b/c", "a"]) == {"a": {"b": 0}}


def test_what_clients_always_send_is_named_as_ignored() -> None:
    fields = {
        "samplers": ["top_k"],
        "n_keep": 0,
        "t_max_predict_ms": 500,
        "n_indent": 2,
        "id_slot": 0,
        "cache_prompt": True,
    }
    response = Api().complete(**fields)
    assert ok(response)["content"] == "Hello 😀!"
    assert set(response.headers["x-pagewick-ignored"].split(", ")) == {
        "samplers",
        "n_keep",
        "t_max_predict_ms",
        "n_indent",
    }
    assert Api(strict=True).complete(samplers=["top_k"]).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": []}}, "prompt"),
        ({"n_predict": 3, "max_tokens": 3}, "n_predict"),
        ({"n": 2, "n_cmpl": 2}, "n_cmpl"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 1000}, "n_probs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"image_data": [{"data": "x"}]}, "image_data"),
        ({"response_fields": ["a"] * 101}, "response_fields"),
        ({"prompt": ["a"] * 3000}, "prompt"),
    ],
)  # fmt: skip
def test_wrong_requests(fields: dict[str, Any], param: str) -> None:
    response = Api().complete(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_failures_in_a_stream_are_events() -> None:
    api = Api()
    api.client.pause_at, api.client.failure = 2, {"finish_reason": "error", "error": "it broke"}
    *_, last = events_of(api.complete(stream=True))
    assert last["error"]["message"] and not last.get("stop")


def test_infilling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    async def encode_infill(self: object, prefix: str, suffix: str, *, others: Any, beginning: str) -> list[int]:
        seen.append((prefix, suffix, others, beginning))
        return HELLO

    body = {"input_prefix": "def f(", "input_suffix": "return x", "prompt": "x"}
    refused = Api().post("/infill", **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input_suffix"
    monkeypatch.setattr("pagewick.async_llm.AsyncEngine.encode_infill", encode_infill)
    monkeypatch.setattr("pagewick.async_llm.AsyncEngine.can_infill", True)
    extra = [{"filename": "a.py", "text": "A = 1"}, {"text": "B"}]
    found = ok(Api("a, b):").post("/infill", **body, input_extra=extra, n_predict=16, response_fields=["content"]))
    assert found == {"content": "a, b):"}
    assert seen == [("def f(", "return x", [OtherFile("a.py", "A = 1"), OtherFile("", "B")], "x")]
    too_many = Api().post("/infill", **body, input_extra=[{"text": ""}] * 257)
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "input_extra"


def test_properties_and_slots() -> None:
    api = Api()
    found = ok(api.run(lambda http: http.get("/props")))
    assert (found["total_slots"], found["model_alias"]) == (8, "org/fake-model")
    assert (found["chat_template"], found["build_info"]) == (QWEN_TEMPLATE, f"pagewick-{__version__}")
    assert found["modalities"] == {"vision": False, "audio": False} and found["eos_token"] == "</s>"
    assert found["default_generation_settings"]["n_ctx"] == MAX_MODEL_LEN
    assert found["default_generation_settings"]["params"]["n_predict"] == -1
    api.client.stats = EngineStats(num_requests_running=3)
    slots = ok(api.run(lambda http: http.get("/slots?fail_on_no_slot=1")))
    assert [one["is_processing"] for one in slots] == [True] * 3 + [False] * 5
    api.client.stats = EngineStats(num_requests_running=8)
    assert api.run(lambda http: http.get("/slots?fail_on_no_slot=1")).status_code == 503
    assert ok(api.run(lambda http: http.get("/slots")))[7]["is_processing"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("llama") / "log")
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.stop()


def test_a_model_answers_as_on_openais_route(server: Server) -> None:
    given = {"prompt": "Pagewick is", "temperature": 0, "n_predict": 12, "ignore_eos": True}
    expected = server.http.post("/v1/completions", json={**given, "n_predict": 12}).json()
    found = ok(server.http.post("/completion", json={**given, "return_tokens": True}))
    assert found["content"] == expected["choices"][0]["text"] and len(found["tokens"]) == 12
    assert (found["tokens_predicted"], found["stop_type"]) == (12, "limit")
    streamed = events_of(server.http.post("/completions", json={**given, "stream": True}))
    assert "".join(one["content"] for one in streamed) == found["content"]


def test_a_prompt_alone_is_computed(server: Server) -> None:
    """n_predict 0 keeps the prompt in the cache, for requests that begin with it."""
    prompt = "The wick of a candle is a braided cord that " * 6
    found = ok(server.http.post("/completion", json={"prompt": prompt, "n_predict": 0}))
    assert (found["content"], found["tokens_predicted"], found["stop_type"]) == ("", 0, "limit")
    again = ok(server.http.post("/completion", json={"prompt": prompt, "n_predict": 1}))
    assert 0 < again["tokens_cached"] < again["tokens_evaluated"] == found["tokens_evaluated"]


def test_a_full_context_is_told(server: Server, tmp_path: Path) -> None:
    context = ok(server.http.get("/props"))["default_generation_settings"]["n_ctx"]
    tokens = server.tokens("Pagewick is ")
    prompt = (tokens * context)[: context - 4]
    found = ok(server.http.post("/completion", json={"prompt": prompt, "ignore_eos": True}))
    assert (found["truncated"], found["tokens_predicted"], found["stop_type"]) == (True, 4, "limit")
