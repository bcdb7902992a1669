"""POST /v1/classify: by a server of several API processes over a tiny encoder, and with models that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewick.cli.example_requests import KEY_VARIABLE
from tests.conformance.servers import Server
from tests.models.encoders import write_encoder
from tests.models.word_pieces import TEXTS, word_pieces, write_tokenizer
from tests.server.api_routes import Api

NAME = "tiny-classifier"
KEY = "a-key-for-tests"
PATHS = ("/v1/classify", "/classify")
LABELS = ["negative", "neutral", "positive"]
MAX_LEN = 80


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    directory = tmp_path_factory.mktemp("classifier")
    write_encoder("bert", directory, "ForSequenceClassification", num_labels=3, id2label=dict(enumerate(LABELS)))
    write_tokenizer(word_pieces(), directory)
    server = Server(
        directory / "log", str(directory), "--task", "classify", "--served-model-name", NAME,
        "--api-server-count", "2", "--api-key", KEY, key=KEY,
    )  # fmt: skip
    try:
        server.wait_until_ready()
        yield server, directory
    finally:
        server.stop()


@pytest.fixture
def server(classifier: tuple[Server, Path]) -> Server:
    return classifier[0]


@pytest.fixture(scope="module")
def expected(classifier: tuple[Server, Path]) -> list[list[float]]:
    """The probabilities by transformers, in the order of the labels."""
    made: Any = transformers.pipeline("text-classification", model=str(classifier[1]), tokenizer=str(classifier[1]))
    found = [{one["label"]: one["score"] for one in scores} for scores in made(TEXTS, top_k=None)]
    return [[scores[label] for label in LABELS] for scores in found]


def post(server: Server, path: str = "/v1/classify", **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_printed_program_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.process.stdout is not None
    printed = "".join(iter(server.process.stdout.readline, "Ctrl-C stops the server.\n"))
    assert f"curl {server.url}/v1/classify " in printed
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    names: dict[str, Any] = {}
    exec(printed[printed.index("import os") :], names)
    names["client"].close()
    assert capsys.readouterr().out.count("'num_classes': 3") == 2


@pytest.mark.parametrize("path", PATHS)
def test_the_response_has_the_form_of_vllm(server: Server, expected: list[list[float]], path: str) -> None:
    body = post(server, path, model=NAME, input=TEXTS)
    assert body.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert body["id"].startswith("classify-") and (body["object"], body["model"]) == ("list", NAME)
    assert isinstance(body["created"], int)
    for place, (one, probs) in enumerate(zip(body["data"], expected, strict=True)):
        assert one.keys() == {"index", "label", "probs", "num_classes"}
        assert (one["index"], one["num_classes"], one["label"]) == (place, 3, LABELS[probs.index(max(probs))])
        assert one["probs"] == pytest.approx(probs, rel=1e-4, abs=1e-6)
    num_tokens = sum(len(word_pieces().encode(text).ids) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


def test_the_forms_of_input(server: Server) -> None:
    data = post(server, input=TEXTS)["data"]
    ids = [word_pieces().encode(text).ids for text in TEXTS]
    assert post(server, input=ids)["data"] == data
    for text, tokens, one in zip(TEXTS, ids, data, strict=True):
        (alone,) = post(server, input=text)["data"]
        assert post(server, input=tokens)["data"] == [alone]
        assert alone == {**one, "index": 0, "probs": pytest.approx(one["probs"], rel=1e-5)}
    plain = word_pieces().encode(TEXTS[0], add_special_tokens=False).ids
    without = post(server, input=TEXTS[0], add_special_tokens=False)
    assert without["usage"]["prompt_tokens"] == len(plain) and without["data"] == post(server, input=plain)["data"]


@pytest.mark.parametrize("name", ["use_activation", "activation"])
def test_logits_in_place_of_probabilities(server: Server, name: str) -> None:
    with_it, usual, without = (
        post(server, input=TEXTS, **fields)["data"] for fields in ({name: True}, {name: None}, {name: False})
    )
    assert with_it == usual
    assert [one["label"] for one in without] == [one["label"] for one in usual]
    for logits, probs in zip(without, usual, strict=True):
        expected = torch.softmax(torch.tensor(logits["probs"]), dim=0).tolist()
        assert probs["probs"] == pytest.approx(expected, rel=1e-5) != logits["probs"]


def test_a_long_text_is_cut_if_the_request_says_so(server: Server) -> None:
    ids = word_pieces().encode("china " * 100).ids
    for limit, kept in ((20, [*ids[:19], ids[-1]]), (-1, [*ids[: MAX_LEN - 1], ids[-1]])):
        cut = post(server, input="china " * 100, truncate_prompt_tokens=limit)
        assert cut["usage"]["prompt_tokens"] == len(kept)
        assert cut["data"] == post(server, input=kept)["data"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "input"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "is not a field of this route"),
        ({"input": ""}, "input", "input[0] is empty; give a text"),
        ({"input": []}, "input", "1 to 2048 entries"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[1], []]}, "input", "input[1] is empty"),
        ({"input": ["a"] * 2049}, "input", "1 to 2048 entries; got 2049"),
        ({"input": ["a", 5]}, "input", "must not mix texts and token ids"),
        ({"input": 5}, "input", "input"),
        ({"input": [[1, "a"]]}, "input[0][1]", "input"),
        ({"input": [5000]}, "input", "token id 5000 is not in the vocabulary"),
        ({"input": [-1]}, "input", "token id -1 is not in the vocabulary"),
        ({"input": "china " * 90}, "input", "maximum context length is 80 tokens"),
        ({"input": ["a", "china " * 90]}, "input[1]", "or set truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "or -1 for as many as fit"),
        ({"input": "a china", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "leave no room for a text"),
        ({"input": "a", "use_activation": "no"}, "use_activation", "use_activation"),
        ({"input": "a", "use_activation": True, "activation": True}, "activation", "another name of use_activation"),
        ({"input": "a", "priority": -1}, "priority", "priority"),
        ({"input": "a", "tools": [{}]}, "tools", "is not a field of this route"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_wrong_requests_name_the_field(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    response = server.http.post("/v1/classify", json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_fields_without_effect_are_named(server: Server) -> None:
    response = server.http.post("/v1/classify", json={"input": "a", "softmaxx": True, "user": "me"})
    assert response.status_code == 200 and response.headers["x-pagewick-ignored"] == "softmaxx"
    refusal = Api(strict=True).post("/classify", input="a", use_activations=False)
    assert refusal.status_code == 400 and "use_activation" in refusal.json()["error"]["message"]


def test_a_key_and_the_right_model_are_needed(server: Server) -> None:
    for path in PATHS:
        assert server.anonymous.post(path, json={"input": "a"}).status_code == 401
    assert server.http.post("/v1/classify", json={"input": "a", "model": "other"}).status_code == 404
    assert server.http.get("/classify").status_code == 405


def test_it_is_measured_and_described(server: Server) -> None:
    for path in PATHS:
        post(server, path, input="a")
    metrics = server.http.get("/metrics").text
    described = server.http.get("/openapi.json").json()
    for path in PATHS:
        assert f'handler="{path}",method="POST",status="200"' in metrics
        operation = described["paths"][path]["post"]
        assert operation["tags"] == ["Classification"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = described["components"]["schemas"][schema]["properties"]
        assert {"input", "truncate_prompt_tokens", "use_activation", "activation"} < fields.keys()
        assert all(field["description"] for field in fields.values())


def test_other_requests_point_to_it(server: Server) -> None:
    for path, fields in (
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        response = server.http.post(path, json=fields)
        assert response.status_code == 400 and "send POST /v1/classify" in response.text


@pytest.mark.parametrize("path", PATHS)
def test_a_model_without_labels_says_so(path: str) -> None:
    response = Api().post(path, input="a")
    assert response.status_code == 400
    assert "this model has no labels by which texts could be classified" in response.json()["error"]["message"]
