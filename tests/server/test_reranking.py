"""POST /v1/rerank and /v1/score, by a server of several API processes over a tiny Qwen3-Reranker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from pagewick.cli.example_requests import KEY_VARIABLE
from tests.conformance.servers import Server
from tests.models.rerankers import DOCUMENTS, QUERY, card_prompt, card_score, write_reranker
from tests.server.api_routes import Api

NAME = "tiny-reranker"
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, nn.Module]]:
    directory = tmp_path_factory.mktemp("reranker")
    model = write_reranker(directory)
    server = Server(
        directory / "log", str(directory), "--rerank", "--dtype", "float32", "--served-model-name", NAME,
        "--api-server-count", "2", "--api-key", KEY, key=KEY,
    )  # fmt: skip
    try:
        server.wait_until_ready()
        yield server, model
    finally:
        server.stop()


@pytest.fixture
def server(reranker: tuple[Server, nn.Module]) -> Server:
    return reranker[0]


@pytest.fixture
def expected(reranker: tuple[Server, nn.Module]) -> list[float]:
    return [card_score(reranker[1], card_prompt(QUERY, document)) for document in DOCUMENTS]


def post(server: Server, path: str, **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_printed_program_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.process.stdout is not None
    printed = "".join(iter(server.process.stdout.readline, "Ctrl-C stops the server.\n"))
    assert f"curl {server.url}/v1/rerank " in printed
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    names: dict[str, Any] = {}
    exec(printed[printed.index("import os") :], names)
    names["client"].close()
    assert capsys.readouterr().out.count("'relevance_score': ") == 2


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"])
def test_documents_come_in_the_order_of_their_scores(server: Server, expected: list[float], path: str) -> None:
    body = post(server, path, model=NAME, query=QUERY, documents=[DOCUMENTS[0], *({"text": t} for t in DOCUMENTS[1:])])
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -round(expected[index], 5))
    assert order != sorted(order) and [one["index"] for one in body["results"]] == order
    found = [one["relevance_score"] for one in body["results"]]
    assert found == pytest.approx([expected[index] for index in order], rel=1e-4, abs=1e-6)
    assert [one["document"] for one in body["results"]] == [{"text": DOCUMENTS[index]} for index in order]
    num_tokens = sum(len(card_prompt(QUERY, document)) for document in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert body["model"] == NAME and body["object"] == "list" and body["id"].startswith("rerank-")


def test_the_best_ones_alone_and_without_their_documents(server: Server) -> None:
    whole = post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    best = post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)["results"]
    assert best == [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in whole[:2]]
    for top_n in (0, 5, 99):
        assert post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=top_n)["results"] == whole


def test_prompts_that_begin_alike_share_the_prefix_cache(server: Server) -> None:
    query, hits = "Which of these is the oldest one?", "vllm:prefix_cache_hits_total"
    post(server, "/v1/rerank", query=query, documents=["a"])
    before = server.metric(hits)
    post(server, "/v1/rerank", query=query, documents=["b", "c"])
    assert server.metric(hits) - before >= 2 * 64


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores_come_in_the_order_of_the_request(
    server: Server, expected: list[float], path: str, names: tuple[str, str]
) -> None:
    body = post(server, path, **{names[0]: QUERY, names[1]: DOCUMENTS})
    assert [(one["index"], one["object"]) for one in body["data"]] == [(n, "score") for n in range(len(DOCUMENTS))]
    assert [one["score"] for one in body["data"]] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert body["object"] == "list" and body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    (alone,) = post(server, path, **{names[0]: QUERY, names[1]: DOCUMENTS[1]})["data"]
    assert alone["score"] == body["data"][1]["score"]


def test_each_text_with_the_one_at_its_place(server: Server) -> None:
    queries = DOCUMENTS[::-1]
    together = post(server, "/v1/score", text_1=queries, text_2=DOCUMENTS)["data"]
    for query, document, found in zip(queries, DOCUMENTS, together, strict=True):
        (alone,) = post(server, "/v1/score", text_1=query, text_2=document)["data"]
        assert alone["score"] == found["score"]


def test_an_instruction_and_truncation(server: Server, reranker: tuple[Server, nn.Module]) -> None:
    long, limit = "Gravity is a force. " * 300, 120
    for name in ("instruction", "instruct"):
        body = post(server, "/v1/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=limit, **{name: "Find it"})
        prompt = card_prompt(QUERY, long, "Find it", max_len=limit)
        assert body["usage"]["prompt_tokens"] == len(prompt) == limit
        assert body["data"][0]["score"] == pytest.approx(card_score(reranker[1], prompt), rel=1e-4)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 5]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c", "instruct": "d"}, "instruct"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c " * 900]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["c " * 900]}, "documents"),
        ("/v1/score", {"text_1": "a", "data_2": ["c " * 900]}, "data_2"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_wrong_requests_name_the_field(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    response = server.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_key_and_the_right_model_are_needed(server: Server) -> None:
    for path in ("/v1/rerank", "/rerank", "/v1/score", "/score"):
        assert server.anonymous.post(path, json={"query": "a", "documents": ["b"]}).status_code == 401
    response = server.http.post("/v1/rerank", json={"query": "a", "documents": ["b"], "model": "other"})
    assert response.status_code == 404


def test_a_model_that_is_no_reranker_says_what_to_do() -> None:
    for path, fields in (
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ):
        response = Api().post(path, **fields)
        assert response.status_code == 400
        assert "nothing says that this model is a reranker; serve one" in response.json()["error"]["message"]
