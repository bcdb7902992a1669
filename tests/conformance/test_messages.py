"""Points 83 and 84: Anthropic's Messages API, with Anthropic's official client, sync and async, streamed and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, DefaultAsyncHttpxClient, DefaultHttpxClient
from pydantic import BaseModel

from tests.conformance.callers import wait_for
from tests.conformance.conftest import KEY
from tests.conformance.described import watch
from tests.conformance.servers import DEADLINE_S, MODEL, Server, until
from tests.conformance.test_transport import CONTEXT, in_engine, load

Fields = dict[str, Any]
MESSAGES = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
QUESTION: list[Any] = [{"role": "user", "content": "what is the weather in Rome?"}]
WEATHER: Fields = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# This client has no parameters for sampling.
GREEDY: Fields = {"extra_body": {"temperature": 0}}


class Caller:
    """Anthropic's client, sync or async; its exceptions pass through. runner: runs the async one; None: sync."""

    def __init__(self, url: str, runner: asyncio.Runner | None, *, max_retries: int = 0, **auth: Any) -> None:
        self._runner = runner
        http = (DefaultAsyncHttpxClient if runner else DefaultHttpxClient)(verify=False)
        watch(http)
        kind: Callable[..., Any] = AsyncAnthropic if runner else Anthropic
        auth = auth or {"api_key": "none"}
        self.client = kind(base_url=url, max_retries=max_retries, timeout=DEADLINE_S, http_client=http, **auth)

    def wait(self, method: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
        return wait_for(self._runner, method, *arguments, **fields)

    def create(self, **fields: Any) -> Any:
        return self.wait(self.client.messages.create, **_with_defaults(fields))

    def final(self, **fields: Any) -> Any:
        """Return the message that the client itself puts together from a stream."""
        manager = self.client.messages.stream(**_with_defaults(fields))
        if self._runner is None:
            with manager as stream:
                return stream.get_final_message()

        async def read() -> Any:
            async with manager as stream:
                return await stream.get_final_message()

        return self._runner.run(read())

    def events(self, **fields: Any) -> list[Any]:
        stream = self.create(stream=True, **fields)
        if self._runner is None:
            return list(stream)

        async def read() -> list[Any]:
            return [event async for event in stream]

        return self._runner.run(read())

    def count(self, **fields: Any) -> int:
        fields = {"model": MODEL, "messages": HI, **fields}
        return int(self.wait(self.client.messages.count_tokens, **fields).input_tokens)


@dataclass
class Way:
    """One of the four ways to get a message."""

    caller: Caller
    is_streamed: bool

    def message(self, **fields: Any) -> Any:
        return self.caller.final(**fields) if self.is_streamed else self.caller.create(**fields)


def _with_defaults(fields: Fields) -> Fields:
    return {"model": MODEL, "messages": HI, "max_tokens": 100, **fields}


@pytest.fixture(scope="module")
def clients(servers: tuple[Server, Server], runner: asyncio.Runner) -> Iterator[dict[str, Caller]]:
    """Both kinds of client for both servers. The guarded server is strict, so that every field must be known."""
    urls, auth = (servers[0].url, servers[1].url), {"api_key": KEY}
    made = {"sync": Caller(urls[0], None), "async": Caller(urls[0], runner)}
    made |= {"sync guarded": Caller(urls[1], None, **auth), "async guarded": Caller(urls[1], runner, **auth)}
    yield made
    for caller in made.values():
        caller.wait(caller.client.close)


@pytest.fixture(params=["sync", "async"])
def claude(request: pytest.FixtureRequest, clients: dict[str, Caller]) -> Caller:
    return clients[request.param]


@pytest.fixture(params=["sync", "async"])
def strict(request: pytest.FixtureRequest, clients: dict[str, Caller]) -> Caller:
    return clients[f"{request.param} guarded"]


@pytest.fixture(params=["sync", "sync streamed", "async", "async streamed"])
def asking(request: pytest.FixtureRequest, clients: dict[str, Caller]) -> Way:
    kind, _, streamed = request.param.partition(" ")
    return Way(clients[kind], bool(streamed))


def error_of(failure: anthropic.APIStatusError) -> tuple[str, str]:
    """Return type and message of an error, after a check of its shape and its id."""
    body = failure.body
    assert isinstance(body, dict) and sorted(body) == ["error", "request_id", "type"] and body["type"] == "error"
    assert body["request_id"] == failure.request_id and failure.request_id
    assert sorted(body["error"]) == ["message", "type"]
    return body["error"]["type"], body["error"]["message"]


def test_point_83_texts(asking: Way, server: Server) -> None:
    """A text has the shape of Anthropic's messages, and is that of a chat."""
    message = asking.message(system="Answer.", **GREEDY)
    (block,) = message.content
    chat = [{"role": "system", "content": "Answer."}, *HI]
    body = server.http.post("/v1/chat/completions", json={"messages": chat, "temperature": 0}).json()
    assert (block.type, block.text) == ("text", body["choices"][0]["message"]["content"])
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_") and message.usage.output_tokens == body["usage"]["completion_tokens"]


def test_point_83_events(claude: Caller) -> None:
    """Events have the order of Anthropic's server, each with the index of its block."""
    events = claude.events(max_tokens=20, extra_body={"temperature": 0, "ignore_eos": True})
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {event.index for event in events[1:-2]} == {0}
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    assert events[-2].delta.stop_reason == "max_tokens" and events[-2].usage.output_tokens == 20


def test_point_83_lines_of_a_stream(server: Server) -> None:
    """Each event has its name in a line of its own, and nothing follows message_stop."""
    body = {"max_tokens": 5, "messages": HI, "stream": True}
    blocks = server.http.post(MESSAGES, json=body).text.split("\n\n")
    for block in blocks[:-1]:
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert blocks[-2].startswith("event: message_stop\n") and blocks[-1] == ""


def test_point_83_count_tokens(asking: Way) -> None:
    """The number of tokens is that of the message's input, whether it was cached or not."""
    fields: Fields
    for fields in ({}, {"system": "Be brief."}, {"messages": QUESTION, "tools": [WEATHER]}):
        usage = asking.message(max_tokens=1, **fields).usage
        count = asking.caller.count(**fields)
        assert count == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_point_83_cached_tokens(claude: Caller) -> None:
    """A prompt that was sent before is read from the prefix cache, without cache_control."""
    fields: Fields = {"system": f"You are number {id(claude)}. " + "Be brief. " * 40, "max_tokens": 1}
    first, second = (claude.create(**fields).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 < second.cache_read_input_tokens
    assert first.input_tokens == second.input_tokens + second.cache_read_input_tokens


@pytest.mark.parametrize(
    "choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=str
)
def test_point_83_tools(asking: Way, choice: Fields) -> None:
    """A call is a tool_use block with its input as an object, and its result is used in the next message."""
    choice = {**choice, "disable_parallel_tool_use": True}
    message = asking.message(messages=QUESTION, tools=[WEATHER], tool_choice=choice, **GREEDY)
    (block,) = message.content
    assert message.stop_reason == "tool_use"
    assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": '{"condition": "windy", "temperature": 7}'}
    messages = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = asking.message(messages=messages, tools=[WEATHER], **GREEDY)
    assert answer.stop_reason == "end_turn" and "windy" in answer.content[0].text


def test_point_83_no_tools(asking: Way) -> None:
    """With the choice none there is no call."""
    message = asking.message(messages=QUESTION, tools=[WEATHER], tool_choice={"type": "none"}, **GREEDY)
    assert [block.type for block in message.content] == ["text"]


def test_point_83_a_call_that_is_cut_off(asking: Way) -> None:
    """A call that max_tokens cuts has the arguments that are complete, streamed or not."""
    choice = {"type": "any"}
    message = asking.message(messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=15, **GREEDY)
    (block,) = message.content
    assert message.stop_reason == "max_tokens" and (block.name, block.input) == ("get_weather", {})


def test_point_83_a_beginning(asking: Way) -> None:
    """The assistant's last message is continued."""
    whole = asking.message(**GREEDY).content[0].text
    beginning = {"role": "assistant", "content": whole[:11]}
    assert whole[:11] + asking.message(messages=[*HI, beginning], **GREEDY).content[0].text == whole


def test_point_83_pydantic_models(strict: Caller) -> None:
    """The client's parse gets JSON of the wanted schema."""

    class Answer(BaseModel):
        city: Literal["Rome", "Paris"]
        unit: Literal["celsius", "fahrenheit"]

    message = strict.wait(strict.client.messages.parse, **_with_defaults({"output_format": Answer}))
    assert isinstance(message.parsed_output, Answer)


def test_point_83_tool_runner(strict: Caller) -> None:
    """The client's loop calls the tool and gets the answer, from a server that takes no unknown fields."""
    asked = []

    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return '{"condition": "windy", "temperature": 7}'

    async def get_weather_later(city: str) -> str:
        return get_weather(city)

    is_async = isinstance(strict.client, AsyncAnthropic)
    make = anthropic.beta_async_tool if is_async else anthropic.beta_tool
    tool = make(get_weather_later if is_async else get_weather, name="get_weather", description=get_weather.__doc__)
    fields = _with_defaults({"messages": QUESTION, "tools": [tool], **GREEDY})
    runner = strict.client.beta.messages.tool_runner(**fields)
    message = strict.wait(runner.until_done)
    assert asked == ["Rome"] and "windy" in message.content[0].text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "claude-none"}, "'claude-none' does not exist"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has type 'image'"),
        ({"messages": [{"role": "user", "content": "word " * CONTEXT}]}, "prompt is too long"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ],
    ids=["model", "max_tokens", "messages", "image", "length", "tool"],
)
def test_point_84_wrong_requests(claude: Caller, fields: Fields, words: str) -> None:
    """A wrong request raises the client's exception, whose message names the field, streamed or not."""
    is_missing = "model" in fields
    kind = anthropic.NotFoundError if is_missing else anthropic.BadRequestError
    for ask in (claude.create, claude.events):
        with pytest.raises(kind) as failure:
            ask(**fields)
        name, message = error_of(failure.value)
        assert name == failure.value.type == ("not_found_error" if is_missing else "invalid_request_error")
        assert words in message


def test_point_84_wrong_paths_and_bodies(server: Server) -> None:
    """Errors before a request is read have the same form."""
    for method, path, content, status in (
        ("POST", MESSAGES, b"{", 400),
        ("POST", f"{MESSAGES}/count_tokens", b"[]", 400),
        ("GET", MESSAGES, b"", 405),
        ("POST", f"{MESSAGES}/nothing", b"{}", 404),
    ):
        response = server.http.request(method, path, content=content)
        body = response.json()
        assert response.status_code == status and body["type"] == "error"
        assert body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("auth", [{"api_key": KEY}, {"auth_token": KEY}], ids=["x-api-key", "bearer"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_point_84_keys(guarded: Server, runner: asyncio.Runner, auth: dict[str, str], is_async: bool) -> None:
    """A key is accepted in x-api-key and as a bearer; a wrong one gives authentication_error."""
    made = {name: Caller(guarded.url, runner if is_async else None, **{name: key}) for name, key in auth.items()}
    (caller,) = made.values()
    assert caller.create(max_tokens=1).content and caller.count() > 0
    wrong = Caller(guarded.url, runner if is_async else None, **dict.fromkeys(auth, "wrong"))
    with pytest.raises(anthropic.AuthenticationError) as failure:
        wrong.create()
    assert error_of(failure.value)[0] == "authentication_error"
    for one in (caller, wrong):
        one.wait(one.client.close)


def test_point_84_too_large_a_body(strict: Caller) -> None:
    """Too large a body gives request_too_large."""
    with pytest.raises(anthropic.APIStatusError) as failure:
        strict.create(system="x" * 70_000)
    assert failure.value.status_code == 413 and error_of(failure.value)[0] == "request_too_large"


def test_point_84_unknown_fields(claude: Caller, strict: Caller) -> None:
    """Unknown fields are named in a header; a strict server refuses them."""
    fields: Fields = {"max_tokens": 1, "extra_body": {"context_management": {"edits": [{"type": "x"}]}}}
    raw = claude.wait(claude.client.messages.with_raw_response.create, **_with_defaults(fields))
    assert raw.headers["x-pagewick-ignored"] == "context_management"
    with pytest.raises(anthropic.BadRequestError) as failure:
        strict.create(**fields)
    assert "context_management" in error_of(failure.value)[1]


def test_point_84_overload(guarded: Server, strict: Caller) -> None:
    """Overload gives rate_limit_error with Retry-After, and tokens are still counted."""
    with load(guarded, 2):
        with pytest.raises(anthropic.RateLimitError) as failure:
            strict.create(max_tokens=1)
        assert error_of(failure.value)[0] == "rate_limit_error"
        assert int(failure.value.response.headers["retry-after"]) >= 1
        assert strict.count() > 0


def test_point_84_stop_sequences(asking: Way) -> None:
    """A stop sequence ends the text before it, and is named."""
    whole = asking.message(**GREEDY).content[0].text
    message = asking.message(stop_sequences=["never", whole[4]], **GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole[4])
    assert message.content[0].text == whole[: whole.index(whole[4])]


def test_point_84_the_context_is_full(asking: Way) -> None:
    """With max_tokens beyond the context the message ends where that is full."""
    words = {"role": "user", "content": "word " * (CONTEXT - 100)}
    message = asking.message(messages=[words], max_tokens=CONTEXT, extra_body={"ignore_eos": True})
    assert message.stop_reason == "model_context_window_exceeded"
    assert asking.caller.count(messages=[words]) + message.usage.output_tokens == CONTEXT


def test_point_84_a_client_that_leaves(claude: Caller, server: Server) -> None:
    """A client that leaves frees its request."""
    stream = claude.create(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    until(lambda: in_engine(server) == 1)
    claude.wait(stream.close)
    until(lambda: in_engine(server) == 0)
