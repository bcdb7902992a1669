"""Tokenize, detokenize and apply a template, in vLLM's and llama.cpp's forms."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from pagewick import __version__
from pagewick.server.core.limits import MAX_CONTEXTS
from tests.fake_engine import MAX_MODEL_LEN, TOKENIZER
from tests.server.api_routes import HELLO, MODEL, Api, error_of

API = Api()


def post(path: str, **fields: Any) -> Any:
    response = API.post(path, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_prompt() -> None:
    token_ids = TOKENIZER.encode("hé 😀", add_special_tokens=False)
    body = post("/tokenize", prompt="hé 😀", model=MODEL)
    assert body == {"count": len(token_ids), "max_model_len": MAX_MODEL_LEN, "tokens": token_ids}
    strings = post("/tokenize", prompt="ab", return_token_strs=True)["token_strs"]
    assert strings == [TOKENIZER.token_bytes(one).decode() for one in TOKENIZER.encode("ab", add_special_tokens=False)]


def test_special_tokens_are_added_as_each_dialect_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (begin,) = TOKENIZER.encode("<s>", add_special_tokens=False)
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    monkeypatch.setattr(TOKENIZER._backend, "post_processor", begins)
    plain = TOKENIZER.encode("ab", add_special_tokens=False)
    for fields, is_added in (
        ({"prompt": "ab"}, True),
        ({"prompt": "ab", "add_special_tokens": False}, False),
        ({"content": "ab"}, False),
        ({"content": "ab", "add_special": True}, True),
    ):
        assert post("/tokenize", **fields)["tokens"] == [begin] * is_added + plain


def test_pieces_that_are_no_text_are_bytes() -> None:
    body = post("/tokenize", content="aé", with_pieces=True)
    pieces = [one["piece"] for one in body["tokens"]]
    assert b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in pieces) == "aé".encode()
    assert pieces[0] == "a" and [0xC3] in pieces
    assert [one["id"] for one in body["tokens"]] == TOKENIZER.encode("aé", add_special_tokens=False)


@settings(max_examples=15, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_round_trip(text: str) -> None:
    tokens = post("/tokenize", content=text)["tokens"]
    assert post("/detokenize", tokens=tokens) == {"prompt": text, "content": text}


def test_messages_count_as_they_do_in_a_request() -> None:
    messages = [{"role": "system", "content": "Be <|im_end|> brief."}, *HELLO]
    for fields in ({}, {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        usage = API.chat(messages=messages, **fields).json()["usage"]
        body = post("/tokenize", messages=messages, **fields)
        assert body["count"] == len(body["tokens"]) == usage["prompt_tokens"]
        assert body["tokens"] == API.client.requests[-1].prompt_token_ids
        assert post("/apply-template", messages=messages, **fields)["prompt"] == API.prompt


def test_templates() -> None:
    opened = "<|im_start|>user\nhi<|im_end|>\n"
    assert post("/apply-template", messages=HELLO)["prompt"] == f"{opened}<|im_start|>assistant\n"
    assert post("/apply-template", messages=HELLO, add_generation_prompt=False)["prompt"] == opened
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    prompt = post("/apply-template", messages=begun, continue_final_message=True)["prompt"]
    assert prompt.startswith(opened) and prompt.endswith("Well")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert '"name": "f"' in post("/apply-template", messages=HELLO, tools=[tool])["prompt"]
    assert post("/tokenize", messages=HELLO, tools=[tool])["count"] > post("/tokenize", messages=HELLO)["count"]


def test_a_template_of_the_request_needs_the_servers_trust() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    error = error_of(API.post("/apply-template", messages=HELLO, chat_template=template))
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    trusting = Api(trust_request_chat_template=True)
    assert trusting.post("/apply-template", messages=HELLO, chat_template=template).json() == {"prompt": "[hi]"}
    assert trusting.chat(chat_template=template).status_code == 200 and trusting.prompt == "[hi]"


def test_a_chat_has_all_of_a_templates_arguments() -> None:
    template = "{{ documents[0].text }}|{{ mood }}|{% if add_generation_prompt %}>{% endif %}"
    api = Api(trust_request_chat_template=True)
    fields: dict[str, Any] = {
        "chat_template": template, "documents": [{"text": "d"}], "chat_template_kwargs": {"mood": "good"},
    }  # fmt: skip
    for more, prompt in (({}, "d|good|>"), ({"add_generation_prompt": False}, "d|good|")):
        assert api.chat(**fields, **more).status_code == 200
        assert api.prompt == prompt
        assert api.post("/apply-template", messages=HELLO, **fields, **more).json() == {"prompt": prompt}


def test_special_tokens_before_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    (begin,) = TOKENIZER.encode("<s>", add_special_tokens=False)
    monkeypatch.setattr(TOKENIZER, "start_token_ids", [begin])
    api = Api()
    for fields, is_added in (({}, False), ({"add_special_tokens": False}, False), ({"add_special_tokens": True}, True)):
        assert api.chat(**fields).status_code == 200
        token_ids = api.client.requests[-1].prompt_token_ids
        assert (token_ids[0] == begin) == is_added
        assert api.post("/tokenize", messages=HELLO, **fields).json()["tokens"] == token_ids


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "content"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special": True, "add_special_tokens": True}, "add_special"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO * 2049}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, TOKENIZER.vocab_size]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_CONTEXTS * MAX_MODEL_LEN + 1)}, "tokens"),
        ("/apply-template", {}, "messages"),
        (
            "/apply-template",
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_is_refused(path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(API.post(path, **fields))["param"] == param


def test_an_unknown_model_and_unknown_fields() -> None:
    assert error_of(API.post("/tokenize", prompt="a", model="other"), 404)["code"] == "model_not_found"
    response = API.post("/detokenize", tokens=[], skip="x")
    assert response.json() == {"prompt": "", "content": ""}
    assert response.headers["x-pagewick-ignored"] == "skip"
    error = error_of(Api(strict=True).post("/tokenize", prompt="a", add_special_token=True))
    assert "did you mean add_special_tokens?" in error["message"]


def test_null_is_the_same_as_leaving_it_out() -> None:
    assert post("/tokenize", prompt="x", messages=None, content=None) == post("/tokenize", prompt="x")
    assert post("/tokenize", messages=HELLO, prompt=None) == post("/tokenize", messages=HELLO)


def test_version() -> None:
    assert API.run(lambda http: http.get("/version")).json() == {"version": __version__}
