"""Ollama's API: what requests become, and how responses, pieces of them and errors are written."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pagewick.server.api.ollama.catalog import ModelFiles
from pagewick.server.api.ollama.conversation import CalledFunction, MadeCall, OllamaMessage, messages_of
from pagewick.server.api.ollama.dialect import OllamaApi
from pagewick.server.api.openai import OpenAIApi
from tests.fake_engine import MAX_MODEL_LEN, NAN_ROW, TOKENIZER
from tests.server.api.other_dialect import Served
from tests.server.api.test_chat_core import Writer

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
SAID = '<think>\nOne é.\n</think>\n\nSo:<call:add>{"a": 1}</call> and <call:sub>{}</call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLS = [
    {"id": "call_0", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}},
    {"id": "call_1", "function": {"index": 1, "name": "sub", "arguments": {}}},
]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n and more").decode()


class Api(Served):
    """A server with OpenAI's and Ollama's API, over a model that writes parts in the fake format."""

    dialects = (OpenAIApi, OllamaApi)

    def __init__(self, *texts: str, **options: Any) -> None:
        super().__init__(**options)
        self.client = Writer()
        self.client.texts = texts or ("Hello 😀!",)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(CHAT, **{"messages": HELLO, "stream": False, **fields})

    def generate(self, **fields: Any) -> httpx.Response:
        return self.post(GENERATE, **{"prompt": "hi", "stream": False, **fields})

    def prompt(self) -> str:
        """The text of the latest request's prompt."""
        return TOKENIZER.decode(self.client.requests[-1].prompt_token_ids, skip_special_tokens=False)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson" and response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def error_of(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    return str(body["error"])


def ending_of(last: dict[str, Any]) -> dict[str, Any]:
    """Check the fields that only the last object has, and return those that do not change from run to run."""
    names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert all(isinstance(last[name], int) for name in names) and last["total_duration"] > 0 < last["eval_duration"]
    return {name: last[name] for name in ("done", "done_reason", "prompt_eval_count", "eval_count")}


def test_a_chat_has_thoughts_text_and_calls_beside_each_other() -> None:
    body = Api(SAID).chat(tools=[ADD], model="org/fake-model").json()
    assert body["model"] == "org/fake-model" and body["created_at"].endswith("Z")
    assert body["message"] == {
        "role": "assistant", "content": "So: and ", "thinking": "One é.", "tool_calls": CALLS,
    }  # fmt: skip
    num_tokens = len(TOKENIZER.encode(SAID, add_special_tokens=False)) + 1
    ending = ending_of(body)
    assert ending.pop("prompt_eval_count") > 0
    assert ending == {"done": True, "done_reason": "stop", "eval_count": num_tokens}


def test_a_stream_is_the_default_and_makes_the_same_response() -> None:
    pieces = lines_of(Api(SAID).post(CHAT, messages=HELLO, tools=[ADD]))
    whole = Api(SAID).chat(tools=[ADD]).json()
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) > 9
    messages = [piece["message"] for piece in pieces]
    assert {name for message in messages for name in message} == set(whole["message"])
    for name in ("content", "thinking"):
        assert "".join(message.get(name, "") for message in messages) == whole["message"][name]
    assert [call for message in messages for call in message.get("tool_calls", [])] == CALLS
    assert ending_of(pieces[-1]) == ending_of(whole) and not pieces[-1]["message"]["content"]
    assert all("done_reason" not in piece and "eval_count" not in piece for piece in pieces[:-1])


def test_a_prompt_is_a_chat_with_instructions_unless_it_is_raw() -> None:
    api = Api()
    body = api.generate(system="Be brief.").json()
    assert (body["response"], body["done_reason"], body["model"]) == ("Hello 😀!", "stop", "org/fake-model")
    templated = api.prompt()
    assert "Be brief." in templated and templated.index("Be brief.") < templated.index("hi")
    api.chat(messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    assert api.prompt() == templated
    raw = api.generate(raw=True, system="Be brief.", think=False)
    assert api.prompt() == "hi" and raw.headers["x-pagewick-ignored"] == "system, think"
    pieces = lines_of(api.post(GENERATE, prompt="hi", raw=True))
    assert "".join(piece["response"] for piece in pieces) == "Hello 😀!" and pieces[-1]["done"]


def test_a_chat_without_messages_and_a_prompt_without_text_only_load_the_model() -> None:
    api = Api()
    for path, fields in (
        (CHAT, {"messages": []}),
        (CHAT, {"messages": None}),
        (GENERATE, {}),
        (GENERATE, {"prompt": "", "keep_alive": 0}),
    ):
        body = api.post(path, model="org/fake-model", **fields).json()
        assert body["done"] and body["done_reason"] == "load" and "eval_count" not in body
        assert body.get("response", body.get("message", {}).get("content")) == ""
    assert not api.client.requests


def test_options_are_sampling_parameters() -> None:
    api = Api()
    options: dict[str, Any] = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["!"],
        "repeat_penalty": 1.5, "repeat_last_n": 9, "presence_penalty": 0.25, "num_ctx": 8, "num_gpu": 1, "num_keep": 4,
    }  # fmt: skip
    response = api.chat(options=options, keep_alive="5m", format="")
    assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers
    assert response.json()["message"]["content"] == "Hello 😀"
    params = api.client.requests[-1].params
    found = (params.max_tokens, params.temperature, params.top_k, params.seed, params.repetition_penalty)
    assert found == (7, 0.5, 3, 5, 1.5)
    assert (params.min_p, params.repeat_last_n, params.presence_penalty) == (0.1, 9, 0.25)
    response = api.chat(options={"num_predict": -2, "seed": -1, "num_ctx": MAX_MODEL_LEN + 1, "tfs_z": 1, "tempo": 2})
    assert sorted(response.headers["x-pagewick-ignored"].split(", ")) == [
        "options.num_ctx", "options.tempo", "options.tfs_z",
    ]  # fmt: skip
    assert api.client.requests[-1].params.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"format": {"type": "nothing"}}, "format"),
        ({"format": "xml"}, "format"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "poet", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "hi", "images": [PNG]}]}, "this model reads text only"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"template": "{{ .Prompt }}"}, "raw prompt"),
        ({"context": [1, 2]}, "/api/chat"),
        ({"width": 64}, "draws"),
    ],
)
def test_errors_name_the_field_as_the_client_has_sent_it(fields: dict[str, Any], words: str) -> None:
    assert words in error_of(Api().chat(**fields))


def test_other_errors_have_the_same_form() -> None:
    api = Api()
    assert "does not exist" in error_of(api.chat(model="other"), 404)
    assert "/api/show" in error_of(api.post("/api/nothing"), 404)
    assert "pagewick models" in error_of(api.post("/api/create", model="x"), 404)
    assert "not valid JSON" in error_of(api.run(lambda http: http.post(CHAT, content=b"{")))
    assert error_of(api.post("/api/tags"), 405).endswith("send the request with GET or HEAD")
    assert "maximum context length" in error_of(api.generate(prompt="word " * MAX_MODEL_LEN))
    assert "suffix" in error_of(api.generate(suffix=" end"))
    assert "images" in error_of(api.generate(raw=True, images=[PNG]))


def test_an_error_in_a_stream_is_its_last_line() -> None:
    api = Api("a" * 40)
    api.client.pause_at, api.client.failure = 3, NAN_ROW
    *pieces, last = lines_of(api.post(CHAT, messages=HELLO))
    assert last == {"error": str(NAN_ROW)}
    assert pieces and not any(piece["done"] for piece in pieces)


def test_log_probabilities_of_tokens_and_alternatives() -> None:
    for stream in (False, True):
        response = Api().chat(logprobs=True, top_logprobs=2, stream=stream)
        objects = lines_of(response) if stream else [response.json()]
        tokens = [token for one in objects for token in one.get("logprobs", [])]
        assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "Hello 😀!"
        assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in tokens)


def test_a_form_is_json_or_a_schema() -> None:
    api = Api('{"a": 1}')
    for form in ("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}):
        assert api.chat(format=form).json()["message"]["content"] == '{"a": 1}'
        assert api.client.requests[-1].constraint is not None
    api.chat(format="")
    assert api.client.requests[-1].constraint is None


def test_thoughts_are_switched_and_limited() -> None:
    api = Api()
    prompts = {}
    for think in (None, True, False, "low"):
        api.chat(think=think)
        prompts[think] = api.prompt()
    assert prompts[False] != prompts[True] == prompts["low"]


def test_results_answer_the_calls_before_them() -> None:
    calls = [{"function": {"name": name, "arguments": {"city": "Rome"}}} for name in ("weather", "time", "weather")]
    messages: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    made = messages_of([OllamaMessage(**_structs(message)) for message in messages], reads_images=False)
    assert made[1]["reasoning_content"] == "Let me see."
    assert [call["id"] for call in made[1]["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]
    assert json.loads(made[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    assert [message.get("tool_call_id") for message in made[2:]] == ["call_1_1", "call_1_0", "call_1_2"]
    assert Api().chat(messages=messages, tools=[ADD]).status_code == 200
    one_more = [*messages, {"role": "tool", "content": "nothing left"}]
    assert "messages[5].tool_call_id" in error_of(Api().chat(messages=one_more, tools=[ADD]))
    # The former name of the tool's name.
    for message in messages:
        if "tool_name" in message:
            message["name"] = message.pop("tool_name")
    assert messages_of([OllamaMessage(**_structs(message)) for message in messages], reads_images=False) == made
    given: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"id": "mine", "function": {"name": "time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "mine", "content": "noon"},
    ]
    made = messages_of([OllamaMessage(**_structs(message)) for message in given], reads_images=False)
    assert made[1]["tool_calls"][0]["id"] == made[2]["tool_call_id"] == "mine"


def _structs(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        MadeCall(function=CalledFunction(**call["function"]), id=call.get("id"))
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


def test_the_last_message_of_the_assistant_goes_on() -> None:
    api = Api()
    api.chat(messages=[*HELLO, {"role": "assistant", "content": "I say"}])
    assert api.prompt().endswith("I say")


@pytest.mark.parametrize(
    ("file", "media_type"),
    [
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"\xff\xd8\xff\xe0", "jpeg"),
        (b"RIFF\x10\0\0\0WEBP", "webp"),
        (b"GIF89a", "gif"),
        (b"BM", "bmp"),
    ],
)
def test_the_type_of_an_image_is_read_off_its_file(file: bytes, media_type: str) -> None:
    given = base64.b64encode(file + b"0123456789").decode()
    message = OllamaMessage(role="user", content="look", images=[given])
    (made,) = messages_of([message], reads_images=True)
    image, text = made["content"]
    assert image["image_url"]["url"] == f"data:image/{media_type};base64,{given}"
    assert text == {"type": "text", "text": "look"}


def test_other_files_and_places_of_images_are_refused() -> None:
    for message in (
        OllamaMessage(role="user", content="look", images=["cGxhaW4gdGV4dA=="]),
        OllamaMessage(role="user", content="look", images=["https://example.org/cat.png"]),
        OllamaMessage(role="system", content="look", images=[PNG]),
    ):
        with pytest.raises(Exception, match=r"messages\[0\]\.images"):
            messages_of([message], reads_images=True)


def test_vectors_of_texts() -> None:
    api = Api()
    api.client.extras = {"embedding": np.array([3, 4], "<f4").tobytes()}
    body = api.post("/api/embed", input=["one", "two words"]).json()
    assert np.allclose(body["embeddings"], [[0.6, 0.8]] * 2) and len(body["embeddings"]) == 2
    assert body["prompt_eval_count"] > 2 and body["model"] == "org/fake-model"
    assert api.post("/api/embed", input="one", dimensions=1).json()["embeddings"] == [[1.0]]
    assert api.post("/api/embeddings", prompt="one").json() == {"embedding": [3.0, 4.0]}
    long = "word " * MAX_MODEL_LEN
    assert api.post("/api/embed", input=long).status_code == 200
    too_long = error_of(api.post("/api/embed", input=long, truncate=False))
    assert "maximum context length" in too_long and "set truncate." in too_long
    assert "input[1] is empty" in error_of(api.post("/api/embed", input=["a", ""]))
    assert "input is empty" in error_of(api.post("/api/embed", input=""))
    assert "prompt is empty" in error_of(api.post("/api/embeddings", prompt=""))


def test_names_may_end_with_latest() -> None:
    api = Api()
    assert api.chat(model="org/fake-model:latest").json()["model"] == "org/fake-model:latest"
    assert api.post("/api/show", name="org/fake-model:latest").status_code == 200
    assert api.chat(model="org/fake-model:8b").status_code == 404


def test_the_model_is_listed_and_described(tmp_path: Path) -> None:
    api = Api()
    (tag,) = api.run(lambda http: http.get("/api/tags")).json()["models"]
    assert tag["name"] == tag["model"] == "org/fake-model" and len(tag["digest"]) == 64
    (loaded,) = api.run(lambda http: http.get("/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"], loaded["size_vram"]) == ("org/fake-model", MAX_MODEL_LEN, 0)
    shown = api.post("/api/show", model="org/fake-model").json()
    assert shown["details"] == tag["details"] == loaded["details"]
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.context_length"] == MAX_MODEL_LEN and family
    assert {"completion", "tools", "thinking"} <= set(shown["capabilities"]) and "<|im_start|>" in shown["template"]
    assert api.run(lambda http: http.get("/api/version")).json()["version"].count(".") == 2
    assert lines_of(api.post("/api/pull", model="org/fake-model"))[-1] == {"status": "success"}
    assert api.post("/api/pull", model="org/fake-model", stream=False).json() == {"status": "success"}
    assert "does not exist" in error_of(api.post("/api/pull", model="another"), 404)


def test_the_size_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-Q8_0-0000{number}-of-00002.gguf").write_bytes(b"x" * number)
        (tmp_path / f"[m]-0000{number}-of-00002.gguf").write_bytes(b"x" * 2 * number)
    (tmp_path / "other.gguf").write_bytes(b"x" * 7)
    (tmp_path / "late.gguf").write_bytes(b"x")
    os.utime(tmp_path / "late.gguf", (1e11, 1e11))
    # The loader reads one of these files.
    for name in ("model", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * 30)
    expected = {
        "m-Q8_0-00001-of-00002.gguf": (3, "gguf"),
        "[m]-00001-of-00002.gguf": (6, "gguf"),
        "other.gguf": (7, "gguf"),
        "": (30, "safetensors"),
        "missing": (0, ""),
    }
    for path, size_and_format in expected.items():
        files = ModelFiles.of(tmp_path / path)
        assert (files.size, files.format) == size_and_format
    assert ModelFiles.of(tmp_path / "late.gguf").modified_at
