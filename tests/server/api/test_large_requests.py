"""Large requests: limits, work beside the event loop, and cancellation when the client leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from pagewick.async_llm import AsyncEngine
from pagewick.errors import QueueFullError
from pagewick.server.api.admission import Admission
from pagewick.server.api.logprobs import EchoedPrompt
from pagewick.server.app import build_app
from pagewick.server.core.limits import MAX_CONTEXTS, MAX_SEQUENCES
from pagewick.server.settings import ServerSettings
from tests.fake_engine import MAX_MODEL_LEN, TOKENIZER, FakeClient, fake_engine, spell
from tests.server.api_routes import CHAT, HELLO, MODEL, Api, error_of
from tests.server.conftest import Server

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_prompts_have_a_limit(stream: bool) -> None:
    api = Api()
    fields: dict[str, Any] = {"prompt": [spell("x") * 400, spell("y") * 100], "max_tokens": 1, "n": 128}
    error = error_of(api.post(COMPLETIONS, echo=True, logprobs=20, stream=stream, **fields))
    assert error["param"] == "logprobs" and "128 * 500 * 21 = 1344000" in error["message"]
    if not stream:
        assert error_of(api.post(COMPLETIONS, prompt_logprobs=20, **fields))["param"] == "prompt_logprobs"
    assert not api.client.requests
    # Without the prompt's they are as many as are generated.
    assert api.post(COMPLETIONS, logprobs=20, echo=False, stream=stream, **fields).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_log_probabilities_are_made_once_and_beside_the_loop(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    original = EchoedPrompt.logprobs

    def logprobs(self: EchoedPrompt, *arguments: Any) -> Any:
        made.append((self.text, threading.get_ident()))
        return original(self, *arguments)

    monkeypatch.setattr(EchoedPrompt, "logprobs", logprobs)
    answer = Api().post(COMPLETIONS, prompt=["ab", "cd"], echo=True, logprobs=1, n=3, stream=stream)
    assert answer.status_code == 200
    assert sorted(text for text, _ in made) == ["ab", "cd"]
    assert threading.get_ident() not in {thread for _, thread in made}


def test_token_ids_have_a_limit() -> None:
    limit = MAX_CONTEXTS * MAX_MODEL_LEN
    text = TOKENIZER.decode(spell("x") * limit, skip_special_tokens=False)
    assert Api().post("/detokenize", tokens=spell("x") * limit).json()["prompt"] == text
    error = error_of(Api().post("/detokenize", tokens=spell("x") * (limit + 1)))
    assert error["param"] == "tokens" and f"at most {limit} ids" in error["message"]


@pytest.mark.parametrize("prompt", [[5] * (MAX_SEQUENCES + 1), ["x"] * (MAX_SEQUENCES + 1), [5, "x"] * MAX_SEQUENCES])
def test_a_prompt_far_beyond_the_context_is_not_looked_at(prompt: list[Any]) -> None:
    error = error_of(Api().post(COMPLETIONS, prompt=prompt))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert f"prompt has {len(prompt)} entries" in error["message"]


@pytest.mark.parametrize(
    ("wrong", "code", "reason"),
    [
        ([TOKENIZER.vocab_size], None, "not in the vocabulary"),
        ([], None, "the prompt is empty"),
        (spell("x") * MAX_MODEL_LEN, "context_length_exceeded", "maximum context length"),
    ],
)
def test_of_several_prompts_the_wrong_one_is_named(wrong: list[int], code: str | None, reason: str) -> None:
    api = Api()
    error = error_of(api.post(COMPLETIONS, prompt=[spell("a"), wrong, spell("b")]))
    assert (error["param"], error["code"]) == ("prompt[1]", code)
    assert error["message"].startswith("prompt[1]: ") and reason in error["message"]
    # An error of another field does not name a prompt.
    error = error_of(api.post(COMPLETIONS, prompt=[spell("a"), spell("b")], stop_token_ids=[2**30]))
    assert error["param"] == "stop_token_ids"
    assert not api.client.requests


@pytest.mark.parametrize(
    ("path", "function", "fields"),
    [
        (CHAT, "chat_input", {"messages": HELLO}),
        (CHAT, "chat_input", {"messages": HELLO, "stream": True}),
        (COMPLETIONS, "encode", {"prompt": ["a", "b"]}),
        (COMPLETIONS, "encode", {"prompt": ["a", "b"], "stream": True}),
        ("/tokenize", "encode", {"prompt": "a"}),
        ("/tokenize", "encode_chat", {"messages": HELLO}),
        ("/apply-template", "render_chat", {"messages": HELLO}),
    ],
)
def test_nothing_is_prepared_for_clients_that_have_left(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, function: str, fields: dict[str, Any]
) -> None:
    begun: list[str] = []
    ends: list[str] = []

    async def work(self: AsyncEngine, *arguments: Any, **more: Any) -> None:
        begun.append(function)
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    monkeypatch.setattr(AsyncEngine, function, work)
    content = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(server.address) as connection:
        connection.sendall(head + content)
        server.until(lambda: bool(begun))
    server.until(lambda: bool(ends))
    assert len(begun) == 1 and not server.engine_client.requests


def test_texts_of_so_many_requests_are_read_at_once() -> None:
    async def receive() -> Any:
        return await asyncio.Event().wait()

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)

    async def main() -> None:
        admission = Admission(fake_engine(FakeClient()), max_text_jobs=2)
        gate = asyncio.Event()
        running = [asyncio.create_task(admission.run(request, gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="reading the texts of 2 requests") as refused:
            await admission.run(request, gate.wait)
        assert refused.value.retry_after_s == 1
        running[0].cancel()
        gate.set()
        await asyncio.wait(running)
        assert await admission.run(request, gate.wait)
        assert running[0].cancelled() and running[1].result()

        async def leave() -> Any:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await admission.run(Request(request.scope, leave), asyncio.Event().wait)
        assert await admission.run(request, gate.wait) and await admission.run(request, gate.wait)

    asyncio.run(main())


@pytest.mark.parametrize(("num_waiting", "status"), [(0, 200), (10, 200), (11, 429)])
def test_a_full_queue_refuses_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, num_waiting: int, status: int
) -> None:
    """The engine's limit counts only requests that have not begun; at most eight others run."""
    client = FakeClient()
    client.stats.num_requests_waiting = num_waiting
    encoded = []
    original = AsyncEngine.encode

    async def encode(self: AsyncEngine, prompt: str, **more: Any) -> list[int]:
        encoded.append(prompt)
        return await original(self, prompt, **more)

    monkeypatch.setattr(AsyncEngine, "encode", encode)

    async def main() -> list[httpx.Response]:
        app = build_app(fake_engine(client), ServerSettings(served_model_name=(MODEL,)), max_waiting_requests=3)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            answers = [await http.post(COMPLETIONS, json={"prompt": "a", "stream": stream}) for stream in (True, False)]
            assert (await http.post("/tokenize", json={"prompt": "b"})).status_code == 200
        return answers

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [status] * 2
    if status == 429:
        assert error_of(answers[0], 429)["code"] == "queue_full" and answers[0].headers["retry-after"] == "1"
    assert encoded == (["b"] if status == 429 else ["a", "a", "b"])
