"""`pagewick serve` with several models, over HTTP: a request loads the model that it names."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import openapi_spec_validator
import psutil
import pytest

from pagewick.demo import MODEL_DIR

READY = re.compile(r"ready on (http://\S+)")
QUESTION = [{"role": "user", "content": "Which port does the server listen on by default?"}]
PRESET = """
[first]
model = "pagewick-demo"
alias = ["another-name"]
load-on-startup = true
max-tokens = 5

[cold]
model = "pagewick-demo"
models-autoload = false
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Path]]:
    """A server with two places for its models, two of which lie in a directory, beside one that cannot be loaded."""
    home = tmp_path_factory.mktemp("several")
    (home / "preset.toml").write_text(PRESET)
    (home / "models/owner").mkdir(parents=True)
    for name in ("second", "owner/third"):
        (home / "models" / name).symlink_to(MODEL_DIR)
    (home / "models/broken").mkdir()
    (home / "models/broken/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    flags = ["--models-dir", "models", "--models-preset", "preset.toml", "--models-max", "2", "--port", "0"]
    flags += ["--sse-keep-alive-interval", "0.1"]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagewick", "serve", *flags, "--max-model-len", "512"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=home,
        )
    assert process.stdout is not None
    with process.stdout as stdout:
        yield next(match[1] for line in stdout if (match := READY.search(line))), process.pid, home / "log"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert children and not any(child.is_running() for child in children)


@pytest.fixture
def address(server: tuple[str, int, Path]) -> str:
    return server[0]


@pytest.fixture
def pid(server: tuple[str, int, Path]) -> int:
    return server[1]


@pytest.fixture
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
def sdk(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(sdk: openai.OpenAI, model: str, **fields: Any) -> str:
    found = sdk.chat.completions.create(model=model, messages=QUESTION, temperature=0, **fields)  # type: ignore[call-overload]
    assert isinstance(found.choices[0].message.content, str)
    return found.choices[0].message.content


def states(http: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in http.get("/v1/models").json()["data"]}


def loaded(http: httpx.Client) -> set[str]:
    return {name for name, state in states(http).items() if state == "loaded"}


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_each_request_gets_its_model_and_the_one_used_longest_ago_makes_room(
    http: httpx.Client, sdk: openai.OpenAI
) -> None:
    assert loaded(http) == {"first", "another-name"}
    assert set(states(http)) == {"first", "another-name", "cold", "second", "owner/third", "broken"}
    short = ask(sdk, "first")
    assert ask(sdk, "another-name") == short
    whole = ask(sdk, "second")
    # The sampling parameters of its table apply to the first model only.
    assert "8000" in whole and whole.startswith(short) and len(whole) > len(short)
    assert loaded(http) == {"first", "another-name", "second"}
    assert ask(sdk, "owner/third") == whole
    assert loaded(http) == {"second", "owner/third"}
    card = http.get("/v1/models/owner/third").json()
    assert (card["id"], card["max_model_len"], card["input_modalities"]) == ("owner/third", 512, ["text"])
    assert http.get("/v1/models/first").json()["max_model_len"] is None


def test_streams_of_more_models_than_places_are_all_answered(sdk: openai.OpenAI, http: httpx.Client) -> None:
    found: dict[str, str] = {}

    def stream(name: str) -> None:
        chunks = sdk.chat.completions.create(model=name, messages=QUESTION, temperature=0, stream=True)  # type: ignore[call-overload]
        found[name] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    threads = [threading.Thread(target=stream, args=[name]) for name in ("first", "second", "owner/third")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["second"] == found["owner/third"] and found["second"].startswith(found["first"])


def test_streams_get_pings_while_their_model_loads(http: httpx.Client, address: str) -> None:
    body = {"model": "second", "messages": QUESTION, "max_tokens": 4, "temperature": 0, "stream": True}

    def streamed(path: str, body: dict[str, Any], *, is_loaded: bool) -> str:
        http.post(f"/models/{'load' if is_loaded else 'unload'}", json={"model": "second"})
        response = http.post(path, json=body)
        assert (response.status_code, response.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        return response.text

    def text(stream: str) -> str:
        return "".join(re.findall(r'"(?:content|text)":"(.*?)"', stream))

    for path, ping in (("/v1/chat/completions", ": ping"), ("/v1/messages", "event: ping")):
        while_loading, at_once = (streamed(path, body, is_loaded=is_loaded) for is_loaded in (False, True))
        assert while_loading.startswith(ping)
        assert text(while_loading) == text(at_once) != ""
        assert while_loading.rstrip().splitlines()[-1] == at_once.rstrip().splitlines()[-1]
        # The application's error comes too late for a status.
        wrong = streamed(path, {**body, "max_tokens": -1}, is_loaded=False)
        assert wrong.startswith(ping) and "max_tokens" in wrong.rstrip().splitlines()[-1]
    # A whole response has nowhere to put a ping.
    http.post("/models/unload", json={"model": "second"})
    assert http.post("/v1/chat/completions", json={**body, "max_tokens": -1, "stream": False}).status_code == 400
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        http.post("/models/unload", json={"model": "second"})
        with client.messages.stream(model="second", max_tokens=3, messages=QUESTION) as stream:  # type: ignore[arg-type]
            assert stream.get_final_message().usage.output_tokens == 3


def test_a_client_that_leaves_after_a_ping_leaves_no_error_in_the_log(
    http: httpx.Client, server: tuple[str, int, Path]
) -> None:
    counted = r'^http_requests_total{.*handler="/v1/chat/completions".*status="499"} (\S+)$'

    def num_left() -> float:
        return sum(map(float, re.findall(counted, http.get("/metrics").text, re.MULTILINE)))

    http.post("/models/unload", json={"model": "second"})
    before = num_left()
    body = {"model": "second", "messages": QUESTION, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert next(response.iter_raw()).startswith(b": ping")
    for _ in range(100):
        if num_left() > before:
            break
        time.sleep(0.05)
    assert num_left() == before + 1
    assert "Traceback" not in server[2].read_text()


def test_ollamas_clients_find_all_models_and_load_the_one_they_name(http: httpx.Client, address: str) -> None:
    client = ollama.Client(host=address)
    before = loaded(http)
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == set(states(http)) and listed["second"].size > 9_000_000 > listed["broken"].size
    unloaded = next(name for name in ("second", "owner/third", "first") if name not in before)
    assert client.show(unloaded).capabilities is None and client.show(unloaded).details
    assert client.pull(unloaded).status == "success" and loaded(http) == before
    assert {model.model for model in client.ps().models} <= before
    http.post("/models/unload", json={"model": unloaded})
    pieces = http.post("/api/chat", json={"model": f"{unloaded}:latest", "messages": QUESTION}).text
    # A ping is white space before the first object.
    assert pieces.startswith(" ") and json.loads(pieces.splitlines()[-1])["done"]
    assert unloaded in loaded(http) and "completion" in (client.show(unloaded).capabilities or ())
    assert unloaded in {model.model for model in client.ps().models}
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat("none", QUESTION)
    client._client.close()


def test_ollamas_clients_unload_a_model(http: httpx.Client, address: str) -> None:
    client = ollama.Client(host=address)
    for unload in (
        lambda: client.generate("second", keep_alive=0).done_reason,
        lambda: client.chat("second", [], keep_alive="0s").done_reason,
        lambda: http.post("/api/generate", json={"model": "second:latest", "keep_alive": 0}).json()["done_reason"],
    ):
        assert client.generate("second", keep_alive="5m").done_reason == "load"
        assert "second" in loaded(http)
        assert unload() == "unload"
        assert "second" not in loaded(http)
    assert client.generate("second", "hi", keep_alive=0, options={"num_predict": 1}).done_reason == "length"
    assert "second" in loaded(http), "the server's flags decide what happens after a response"
    client._client.close()


def test_a_name_that_does_not_exist_and_none_at_all(http: httpx.Client, address: str) -> None:
    body: dict[str, Any] = {"messages": QUESTION}
    missing = http.post("/v1/chat/completions", json=body)
    assert error_of(missing) == (400, "model_required") and "'second'" in missing.text
    for method, path, more in (("POST", "/v1/chat/completions", body), ("POST", "/tokenize", {"prompt": "a"})):
        assert error_of(http.request(method, path, json=more | {"model": "none"})) == (404, "model_not_found")
    assert error_of(http.get("/v1/models/none")) == (404, "model_not_found")
    wrong = http.post("/v1/chat/completions", json={"model": 7})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model"
    assert http.post("/v1/chat/completions", content=b"{").status_code == 400
    assert http.post("/v1/nothing", json={"model": "second"}).status_code == 404
    # Anthropic's clients get errors in the form that they know.
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(model="none", max_tokens=3, messages=QUESTION)  # type: ignore[arg-type]
        answer = client.messages.create(model="second", max_tokens=3, messages=QUESTION)  # type: ignore[arg-type]
        assert answer.usage.output_tokens == 3


def test_records_of_an_engine_name_its_model(http: httpx.Client, server: tuple[str, int, Path]) -> None:
    for name in ("first", "second"):
        assert http.post("/v1/chat/completions", json={"model": name, "messages": QUESTION}).status_code == 200
    lines = server[2].read_text().splitlines()
    for name in ("first", "second"):
        assert any(line.startswith(f"[model {name}] INFO ") for line in lines), lines


def test_a_model_that_cannot_be_loaded_does_no_harm(http: httpx.Client, sdk: openai.OpenAI) -> None:
    before = loaded(http)
    response = http.post("/v1/chat/completions", json={"model": "broken", "messages": QUESTION})
    assert error_of(response) == (500, "model_load_failed") and "/" not in response.json()["error"]["message"]
    assert http.get("/v1/models/broken").json()["status"] == {"value": "unloaded", "failed": True}
    assert loaded(http) == before
    assert ask(sdk, "second") and http.get("/health").status_code == 200
    assert len(before) >= 2


def test_models_are_loaded_and_unloaded_by_request(http: httpx.Client) -> None:
    body = {"model": "cold", "messages": QUESTION, "max_tokens": 2}
    assert error_of(http.post("/v1/chat/completions", json=body)) == (400, "model_not_loaded")
    assert http.post("/models/load", json={"model": "cold"}).json() == {"success": True}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert http.post("/models/unload", json={"model": "cold"}).json() == {"success": True}
    assert states(http)["cold"] == "unloaded"
    assert error_of(http.post("/models/load", json={"model": "none"})) == (404, "model_not_found")


def test_responses_and_conversations_outlive_the_model_that_made_them(http: httpx.Client, sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(model="first", input="Which port does the server listen on by default?")
    ask(sdk, "first", extra_body={"session_id": "one", "record_conversation": True})
    assert http.post("/models/unload", json={"model": "first"}).json() == {"success": True}
    assert sdk.responses.retrieve(made.id).output_text == made.output_text
    messages = http.get("/v1/sessions/one").json()["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    # Another model may go on.
    second = sdk.responses.create(model="second", input="And the host?", previous_response_id=made.id)
    assert second.previous_response_id == made.id
    sdk.responses.delete(made.id)
    assert http.delete("/v1/sessions/one").status_code == 200


def test_an_engine_that_dies_is_started_again_beside_the_others(
    http: httpx.Client, sdk: openai.OpenAI, pid: int
) -> None:
    ask(sdk, "second")
    ask(sdk, "owner/third")
    engines = [child for child in psutil.Process(pid).children() if "engine_process" in " ".join(child.cmdline())]
    assert len(engines) == 2
    engines[0].kill()
    for name in ("second", "owner/third"):
        with httpx.Client(base_url=http.base_url, timeout=60) as client:
            for _ in range(200):
                response = client.post("/tokenize", json={"model": name, "prompt": "a"})
                again = client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
                if response.status_code == again.status_code == 200:
                    break
                time.sleep(0.1)
        assert again.status_code == 200, again.text


def test_the_counts_of_a_model_outlive_it(http: httpx.Client, sdk: openai.OpenAI) -> None:
    def accepted(name: str) -> float:
        pattern = rf'^pagewick:requests_accepted_total{{model_name="{name}"}} (\S+)$'
        return float(re.findall(pattern, http.get("/metrics").text, re.MULTILINE)[0])

    ask(sdk, "second")
    before = accepted("second")
    http.post("/models/unload", json={"model": "second"})
    assert accepted("second") == before
    ask(sdk, "second")
    assert accepted("second") == before + 1
    pattern = r'^pagewick:requests_refused_total{model_name="(.*)",reason="invalid_request"} (\S+)$'
    refused = dict(re.findall(pattern, http.get("/metrics").text, re.MULTILINE))
    assert http.post("/v1/completions", json={"model": "second", "prompt": "a", "max_tokens": -1}).status_code == 400
    later = dict(re.findall(pattern, http.get("/metrics").text, re.MULTILINE))
    # A model counts what it has refused itself, and nobody else does.
    assert later == {**refused, "second": str(float(refused["second"]) + 1)}
    text = http.get("/metrics").text
    assert len(re.findall(r"^process_resident_memory_bytes ", text, re.MULTILINE)) == 1


def test_a_compressed_body_and_the_model_in_the_query(http: httpx.Client) -> None:
    body = gzip.compress(json.dumps({"prompt": "Which port"}).encode())
    response = http.post("/tokenize?model=second", content=body, headers={"content-encoding": "gzip"})
    assert response.status_code == 200 and response.json()["count"] > 0
    both = http.post("/tokenize?model=second", json={"prompt": "a", "model": "first"})
    assert both.status_code == 400 and "different models" in both.text


def test_the_description_of_the_api_is_valid_and_has_the_models_routes(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    openapi_spec_validator.validate(document)
    assert {"/models/load", "/models/unload", "/v1/models", "/v1/chat/completions", "/tokenize"} <= set(
        document["paths"]
    )
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["summary"] == "Answer a conversation" and "ChatCompletionRequest" in json.dumps(chat["requestBody"])
