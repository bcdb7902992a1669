"""The commands that `pagewick serve` prints when it is ready: pasted, they do what they say."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pagewick.cli.example_requests import KEY_VARIABLE, curl_line, python_snippet
from pagewick.config import EngineConfig
from pagewick.server.run import ReadyServer
from tests.conformance.servers import Server
from tests.scripted_engine import ScriptedEngine

NAME = """it's a "model" """
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    server = Server(log, "--api-key", KEY, "--served-model-name", NAME, key=KEY)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def ready(server: Server, *, has_chat_template: bool = True, is_reranker: bool = False, **fields: Any) -> ReadyServer:
    """fields: of the ModelInfo."""
    info = ScriptedEngine(EngineConfig(), script=lambda request: [], vocab_size=9, eos_token_id=1).info
    info = msgspec.structs.replace(info, **fields)
    return ReadyServer(server.url, info, True, has_chat_template, is_reranker)


@pytest.mark.parametrize(
    ("kind", "path", "printed"),
    [
        ({}, "/v1/chat/completions", "inference"),
        ({"has_chat_template": False}, "/v1/completions", " "),
        ({"embedding": "last"}, "/v1/embeddings", ", "),
    ],
)
def test_they_can_be_pasted(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: dict[str, bool | str],
    path: str,
    printed: str,
) -> None:
    is_one = ready(server, **kind)  # type: ignore[arg-type]
    curl, address, *headers, flag, body = shlex.split(curl_line(NAME, is_one))
    assert (curl, address, flag, json.loads(body)["model"]) == ("curl", f"{server.url}{path}", "-d", NAME)
    assert headers == ["-H", "content-type: application/json", "-H", f"authorization: Bearer ${KEY_VARIABLE}"]
    response = server.http.post(path, json=json.loads(body))
    assert response.status_code == 200, response.text

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    names: dict[str, Any] = {}
    exec(python_snippet(NAME, is_one), names)
    names["client"].close()
    assert printed in capsys.readouterr().out


def test_a_reranker_is_asked_to_rerank(server: Server) -> None:
    is_one = ready(server, is_reranker=True)
    assert f"curl {server.url}/v1/rerank " in curl_line(NAME, is_one)
    assert 'client.post("/rerank", cast_to=object, body={"model": ' in python_snippet(NAME, is_one)


def test_a_classifier_is_asked_to_classify(server: Server) -> None:
    is_one = ready(server, is_reranker=True, num_labels=3)
    assert f"curl {server.url}/v1/classify " in curl_line(NAME, is_one)
    assert 'client.post("/classify", cast_to=object, body={"model": ' in python_snippet(NAME, is_one)
    is_reranker = ready(server, is_reranker=True, num_labels=2, label_activation="softmax")
    assert f"curl {server.url}/v1/rerank " in curl_line(NAME, is_reranker)
