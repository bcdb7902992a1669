"""Ollama's API with Ollama's official client, sync and async, against `pagewick serve` with the built-in model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import ollama
import pytest

from tests.conformance.callers import wait_for
from tests.conformance.conftest import KEY
from tests.conformance.described import watch
from tests.conformance.servers import MODEL, SECOND_NAME, Server

QUESTION: list[Any] = [{"role": "user", "content": "Which port does the server listen on by default?"}]
GREEDY = {"temperature": 0}


class Caller:
    """Ollama's client, sync or async; its exceptions pass through. runner: runs the async one; None: sync."""

    def __init__(self, url: str, runner: asyncio.Runner | None, **options: Any) -> None:
        self._runner = runner
        kind = ollama.AsyncClient if runner else ollama.Client
        self.client: Any = kind(host=url, verify=False, **options)
        watch(self.client._client)

    def close(self) -> None:
        http = self.client._client
        wait_for(self._runner, http.close if self._runner is None else http.aclose)

    def call(self, name: str, **fields: Any) -> Any:
        return wait_for(self._runner, getattr(self.client, name), **fields)

    def pieces(self, name: str, **fields: Any) -> list[Any]:
        """Return the objects of a stream."""
        if self._runner is None:
            return list(getattr(self.client, name)(stream=True, **fields))

        async def read() -> list[Any]:
            stream: AsyncIterator[Any] = await getattr(self.client, name)(stream=True, **fields)
            return [piece async for piece in stream]

        return self._runner.run(read())


@pytest.fixture(params=["sync", "async"])
def ollama_caller(request: pytest.FixtureRequest, server: Server, runner: asyncio.Runner) -> Iterator[Caller]:
    caller = Caller(server.url, runner if request.param == "async" else None)
    yield caller
    caller.close()


def test_a_chat_at_once_and_as_a_stream(ollama_caller: Caller) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "options": GREEDY}
    whole = ollama_caller.call("chat", **fields)
    assert "8000" in whole.message.content and whole.message.role == "assistant"
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", MODEL)
    assert whole.eval_count > 5 < whole.prompt_eval_count and whole.total_duration >= whole.eval_duration > 0
    *pieces, last = ollama_caller.pieces("chat", **fields)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert last.done and (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert not any(piece.done for piece in pieces)
    cut = ollama_caller.call("chat", **{**fields, "options": {**GREEDY, "num_predict": 2}})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)


def test_a_tool_is_called_and_its_result_is_read(ollama_caller: Caller) -> None:
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
          city: The name of the city.
        """
        return f"sun in {city}"

    messages: list[Any] = [{"role": "user", "content": "what is the weather in Rome?"}]
    fields: dict[str, Any] = {"model": MODEL, "tools": [get_weather], "options": GREEDY}
    (call,) = ollama_caller.call("chat", messages=messages, **fields).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})
    streamed = ollama_caller.pieces("chat", messages=messages, **fields)
    assert [one for piece in streamed for one in piece.message.tool_calls or ()] == [call]
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    later = [*messages, {"role": "assistant", "tool_calls": [call.model_dump()]}, result]
    assert ollama_caller.call("chat", messages=later, **fields).message.content


def test_a_prompt_and_a_raw_one(ollama_caller: Caller) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": QUESTION[0]["content"], "options": GREEDY}
    whole = ollama_caller.call("generate", **fields)
    assert "8000" in whole.response and whole.done_reason == "stop"
    assert "".join(piece.response for piece in ollama_caller.pieces("generate", **fields)) == whole.response
    raw = ollama_caller.call("generate", **{**fields, "raw": True, "options": {**GREEDY, "num_predict": 3}})
    assert raw.eval_count <= 3 and raw.prompt_eval_count < whole.prompt_eval_count
    form = {
        "type": "object",
        "properties": {"port": {"type": "integer", "minimum": 1, "maximum": 65535}},
        "required": ["port"],
    }
    made = ollama_caller.call("generate", format=form, **fields)
    assert made.response.startswith("{") and '"port"' in made.response
    assert ollama_caller.call("generate", model=MODEL).done_reason == "load"
    tokens = ollama_caller.call("generate", logprobs=True, top_logprobs=2, **fields).logprobs
    assert "".join(token.token for token in tokens) == whole.response
    assert all(token.top_logprobs[0].logprob >= token.logprob for token in tokens)


def test_vectors(ollama_caller: Caller) -> None:
    found = ollama_caller.call("embed", model=MODEL, input=["a port", "a cat"])
    assert np.allclose(np.linalg.norm(found.embeddings, axis=1), 1, atol=1e-4) and len(found.embeddings) == 2
    former = np.array(ollama_caller.call("embeddings", model=MODEL, prompt="a port").embedding)
    assert np.allclose(former / np.linalg.norm(former), found.embeddings[0], atol=1e-3)


def test_models_are_listed_described_and_pulled(ollama_caller: Caller) -> None:
    models = ollama_caller.call("list").models
    assert [model.model for model in models] == [MODEL, SECOND_NAME] and models[0].size > 9_000_000
    details = models[0].details
    assert (details.format, details.family, details.quantization_level) == ("safetensors", "qwen3", "BF16")
    assert details.parameter_size == "5.0M"
    (running,) = ollama_caller.call("ps").models
    assert running.model == MODEL and running.context_length > 0 and running.size == models[0].size
    shown = ollama_caller.call("show", model=f"{MODEL}:latest")
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.modelinfo["qwen3.context_length"] == running.context_length
    assert ollama_caller.call("pull", model=MODEL).status == "success"
    assert ollama_caller.pieces("pull", model=MODEL)[-1].status == "success"


def test_errors_are_the_clients_own(ollama_caller: Caller, guarded: Server) -> None:
    for name, fields, status in (
        ("chat", {"model": "another", "messages": QUESTION}, 404),
        ("chat", {"model": MODEL, "messages": QUESTION, "options": {"temperature": -1}}, 400),
        ("pull", {"model": "another"}, 404),
        ("delete", {"model": MODEL}, 404),
        ("copy", {"source": MODEL, "destination": "x"}, 404),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            ollama_caller.call(name, **fields)
        assert caught.value.status_code == status and caught.value.error
    anonymous = Caller(guarded.url, None)
    with pytest.raises(ollama.ResponseError) as caught:
        anonymous.call("list")
    assert caught.value.status_code == 401 and "key" in caught.value.error
    anonymous.close()


def test_a_strict_server_knows_what_the_client_can_send(guarded: Server) -> None:
    allowed = Caller(guarded.url, None, headers={"authorization": f"Bearer {KEY}"})
    options = {"num_gpu": 1, "num_thread": 2, "use_mmap": True, "num_ctx": 64, "num_keep": 4, "num_predict": 1}
    assert allowed.call("chat", model=MODEL, messages=QUESTION, options=options, keep_alive="5m").done
    allowed.close()
