"""Chats whose model calls tools of the server's own: the rounds, at once and as a stream, over a scripted model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx
import pytest
from msgspec import structs
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion

from pagewick.async_llm import AsyncEngine
from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.server.app import build_app
from pagewick.server.core.tool_rounds import ToolFailure
from pagewick.server.settings import ServerSettings
from pagewick.text.chat_template import ChatTemplate
from tests.fake_engine import TOKENIZER, FakeClient, spell
from tests.fake_parts import FakeFormat
from tests.server.api_routes import CHAT, HELLO, error_of, events_of
from tests.tiny_text import QWEN_TEMPLATE

SETTINGS = ServerSettings(served_model_name=("m",))
LOOK = '<call:look>{"at": "sky"}</call>'
PHONE = {"type": "function", "function": {"name": "phone", "parameters": {"type": "object"}}}

_Result = TypeVar("_Result")


class ScriptedClient(FakeClient):
    """The k-th request gets the k-th text; later ones get the last one."""

    def reset(self) -> None:
        super().reset()
        self.info = structs.replace(self.info, max_model_len=20_000)

    def _delta(self, request: EngineRequest, index: int, position: int) -> RequestDelta:
        place = self.requests.index(request)
        token_id = [*spell(self.texts[min(place, len(self.texts) - 1)]), TOKENIZER.eos_token_ids[0]][position]
        delta = super()._delta(request, index, 0)
        last = structs.replace(delta, token_ids=[token_id], decode_s=position / 100, finish_reason=None)
        if delta.logprobs is not None:
            last.logprobs = [structs.replace(delta.logprobs[0], token_id=token_id)]
        if token_id == TOKENIZER.eos_token_ids[0]:
            last.finish_reason, last.stop_token_id = "stop", token_id
        elif position + 1 == request.params.max_tokens:
            last.finish_reason = "length"
        return last


class Tools:
    """A ServerTools whose results a test sets, by name."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.results = dict(results)
        self.definitions: Sequence[Mapping[str, Any]] = [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in results
        ]
        self.max_rounds = 3
        self.timeout_s = 60.0
        self.called: list[tuple[str, Mapping[str, Any], float]] = []
        self.num_cancelled = 0

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        self.called.append((name, arguments, timeout_s))
        result = self.results[name]
        try:
            return str(await result() if callable(result) else result)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class Server:
    def __init__(self, *texts: str, **results: Any) -> None:
        self.client = ScriptedClient()
        self.client.texts = texts
        self.tools = Tools(results or {"look": "blue", "hear": "a bird"})

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[_Result]]) -> _Result:
        async def main() -> _Result:
            template = ChatTemplate({"default": QWEN_TEMPLATE}, TOKENIZER)
            engine = AsyncEngine(self.client, TOKENIZER, template, part_formats=[FakeFormat()])
            app = build_app(engine, SETTINGS, tools=self.tools)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await work(http)

        return asyncio.run(main())

    def post(self, **fields: Any) -> httpx.Response:
        body = {"messages": HELLO, "temperature": 0, **fields}
        return self.run(lambda http: http.post(CHAT, json=body))

    def both(self, **fields: Any) -> dict[str, Any]:
        """The whole response, which must be what the chunks of a stream add up to."""
        self.client.requests.clear()
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        whole: dict[str, Any] = response.json()
        ChatCompletion.model_validate(whole)
        seen, calls = list(self.client.requests), list(self.tools.called)
        self.client.requests.clear()
        streamed: dict[Any, Any] = {}
        finish: dict[str, Any] = {}
        for event in events_of(self.post(stream=True, stream_options={"include_usage": True}, **fields)):
            for choice in event["choices"]:
                accumulate_delta(streamed, choice["delta"])
                assert not finish, "something after the end"
                if choice["finish_reason"] is not None:
                    finish = {name: choice[name] for name in ("finish_reason", "stop_reason")}
            usage = event["usage"]
        assert [one.prompt_token_ids for one in self.client.requests] == [one.prompt_token_ids for one in seen]
        (choice,) = whole["choices"]
        assert finish == {name: choice[name] for name in finish} and usage == whole["usage"]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        assert {name: value for name, value in _without_index(streamed).items() if value is not None} == message
        self.client.requests[:], self.tools.called[:] = seen, calls
        return whole

    @property
    def prompts(self) -> list[str]:
        return [TOKENIZER.decode(one.prompt_token_ids, skip_special_tokens=False) for one in self.client.requests]


def _without_index(message: dict[Any, Any]) -> dict[Any, Any]:
    calls = [{name: value for name, value in one.items() if name != "index"} for one in message.get("tool_calls", [])]
    return {**message, **({"tool_calls": calls} if calls else {})}


def message_of(whole: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = whole["choices"][0]["message"]
    return message


def test_the_server_runs_its_tools_until_the_model_answers() -> None:
    two = f"I look.{LOOK}<call:hear>{{}}</call>"
    server = Server(two, f"I look again.{LOOK}", "It is blue.")
    whole = server.both()
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "I look.\n\nI look again.\n\nIt is blue."
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["server_tool_calls"] == [
        {"index": 0, "round": 0, "id": "call_0", "name": "look", "arguments": '{"at": "sky"}', "result": "blue",
         "is_error": False},
        {"index": 1, "round": 0, "id": "call_1", "name": "hear", "arguments": "{}", "result": "a bird",
         "is_error": False},
        {"index": 2, "round": 1, "id": "call_0", "name": "look", "arguments": '{"at": "sky"}', "result": "blue",
         "is_error": False},
    ]  # fmt: skip
    assert [(name, arguments) for name, arguments, _ in server.tools.called] == [
        ("look", {"at": "sky"}), ("hear", {}), ("look", {"at": "sky"}),
    ]  # fmt: skip
    # Each prompt is the one before it with the model's text, its calls and the results.
    first, second, third = server.prompts
    assert "look" in first and "hear" in first
    begun = first.removesuffix("<|im_start|>assistant\n")
    assert (
        begun != first and second.startswith(begun) and third.startswith(second.removesuffix("<|im_start|>assistant\n"))
    )
    assert all(text in second[len(begun) :] for text in ("I look.", "sky", "blue", "a bird"))
    # The usage counts every round.
    prompts = sum(len(one.prompt_token_ids) for one in server.client.requests)
    texts = len(two) + len(f"I look again.{LOOK}") + len("It is blue.") + 3
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (prompts, texts)


def test_tools_run_at_the_same_time_and_a_stream_shows_it() -> None:
    async def look() -> str:
        await met.wait()
        return "blue"

    async def hear() -> str:
        met.set()
        return "a bird"

    met = asyncio.Event()
    server = Server(f"{LOOK}<call:hear>{{}}</call>", "Done.", look=look, hear=hear)
    events = events_of(server.post(stream=True))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("server_tool_calls", [])]
    assert [(call["index"], call.get("name"), call.get("result")) for call in calls] == [
        (0, "look", None), (1, "hear", None), (1, None, "a bird"), (0, None, "blue"),
    ]  # fmt: skip
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Done."


def test_a_call_of_the_clients_tool_goes_to_the_client() -> None:
    server = Server('Hm.<call:look>{}</call><call:phone>{"to": "x"}</call>', "never")
    whole = server.both(tools=[PHONE])
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "phone", "arguments": '{"to": "x"}'}}
    ]
    (run,) = choice["message"]["server_tool_calls"]
    assert run["result"] == "blue" and len(server.client.requests) == 1
    # The client sends the message back as it is, with its own result: the model reads both.
    server.client.requests.clear()
    server.client.texts = ["The end."]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "nobody there"}
    server.post(messages=[*HELLO, choice["message"], result], tools=[PHONE])
    assert all(text in server.prompts[0] for text in ("Hm.", "look", "blue", "phone", "nobody there"))


def test_only_the_assistant_has_calls_of_the_server() -> None:
    run = {"id": "c", "name": "look", "arguments": "{}", "result": "blue"}
    error = error_of(Server("x").post(messages=[{"role": "user", "content": "hi", "server_tool_calls": [run]}]))
    assert error["param"] == "messages[0].server_tool_calls"


def test_the_limit_of_rounds_is_a_clear_end() -> None:
    server = Server(LOOK)
    (choice,) = server.both()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "tool_rounds")
    *done, last = choice["message"]["server_tool_calls"]
    assert [one["result"] for one in done] == ["blue"] * 3 and len(server.tools.called) == 3
    assert last["is_error"] and last["result"] == "not run: the request has had 3 rounds of calls, which is the limit"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("<call:look>{not json}</call>", "the arguments are not JSON: "),
        ("<call:look>[1]</call>", "the arguments must be a JSON object"),
        ("<call:look>" + "[" * 1500 + "</call>", "the arguments are not JSON: "),
        ("<call:lock>{}</call>", "there is no tool 'lock'; there are: hear, look"),
    ],
)
def test_the_model_learns_of_a_wrong_call(text: str, result: str) -> None:
    server = Server(text, "Sorry.")
    message = message_of(server.both())
    (run,) = message["server_tool_calls"]
    assert run["is_error"] and run["result"].startswith(result) and message["content"] == "Sorry."
    assert not server.tools.called and result in server.prompts[1]


def test_the_model_learns_of_a_failure() -> None:
    async def look() -> str:
        raise ToolFailure("the tool gave no result within 60 s")

    server = Server(LOOK, "Sorry.", look=look)
    (run,) = message_of(server.both())["server_tool_calls"]
    assert run["is_error"] and run["result"] == "the tool gave no result within 60 s"
    assert "no result within 60 s" in server.prompts[1]


def test_max_tokens_holds_for_all_rounds() -> None:
    server = Server(LOOK, "It is blue.")
    whole = server.both(max_tokens=len(LOOK) + 1 + 5)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "It is" and choice["finish_reason"] == "length"
    assert [one.params.max_tokens for one in server.client.requests] == [len(LOOK) + 6, 5]
    # Nothing is left after the call: it has run, and the model says no more.
    whole = server.both(max_tokens=len(LOOK) + 1)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert message_of(whole)["server_tool_calls"][0]["result"] == "blue"
    # A call that is cut off does not run.
    server.tools.called.clear()
    whole = server.both(max_tokens=len(LOOK) - 10)
    assert whole["choices"][0]["finish_reason"] == "length" and not server.tools.called
    (run,) = message_of(whole)["server_tool_calls"]
    assert run["result"] == "not run: the response ended before the call was complete"


def test_results_that_fill_the_context_end_the_response() -> None:
    server = Server(LOOK, "never", look="x" * 30_000)
    (choice,) = server.both()["choices"]
    assert choice["finish_reason"] == "length" and len(server.client.requests) == 1


def test_thoughts_tokens_and_logprobs_of_all_rounds_follow_each_other() -> None:
    server = Server(f"One.{LOOK}", "Two.")
    whole = server.both(logprobs=True, top_logprobs=1, return_token_ids=True)
    (choice,) = whole["choices"]
    text = "".join(one["token"] for one in choice["logprobs"]["content"])
    # The notation's last character counts as text.
    assert text == "One.>Two."
    assert len(choice["token_ids"]) == len(f"One.{LOOK}") + len("Two.") + 2
    assert whole["prompt_token_ids"] == server.client.requests[0].prompt_token_ids


def test_a_begun_message_goes_on_with_the_calls() -> None:
    server = Server(LOOK, "Blue.")
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    message = message_of(server.both(messages=messages, continue_final_message=True, add_generation_prompt=False))
    assert message["content"] == "Blue."
    first, second = server.prompts
    assert first.rstrip().endswith("Well,")
    _, begun, last = second.split("<|im_start|>assistant\n")
    assert "Well," in begun and "<tool_call>" in begun and "blue" in begun and not last


@pytest.mark.parametrize(
    "fields", [{"server_tools": False}, {"server_tools": []}, {"tool_choice": "none"}, {"tool_choice": "none", "n": 2}]
)
def test_a_request_may_do_without(fields: dict[str, Any]) -> None:
    server = Server("Hello.")
    whole = server.post(**fields).json()
    assert "server_tool_calls" not in message_of(whole) and "look" not in server.prompts[0]


def test_a_request_may_choose() -> None:
    server = Server("Hello.")
    server.post(server_tools=["hear"])
    look = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
    server.post(tools=[PHONE], tool_choice={"type": "allowed_tools", "allowed_tools": look})
    assert ["look" in prompt for prompt in server.prompts] == [False, True] and "hear" in server.prompts[0]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"server_tools": ["smell"]}, "server_tools", "names 'smell', which is none of: look, hear"),
        ({"n": 2}, "n", "n must be 1 with the tools of the server; set server_tools to false"),
        ({"record_conversation": True, "session_id": "s"}, "record_conversation", "cannot be combined"),
        (
            {"tools": [{"type": "function", "function": {"name": "look"}}]},
            "tools[0].function.name",
            "'look' is the name of a tool of the server",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(127)]},
            "tools",
            "there are 127 tools and 2 of the server's, but a model is offered 128 at most",
        ),
    ],
)
def test_wrong_requests_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    error = error_of(Server("x").post(**fields))
    assert error["param"] == param and message in error["message"]


def test_a_server_without_tools_says_so() -> None:
    server = Server("Hello.")
    server.tools = None  # type: ignore[assignment]
    assert "start it with --mcp-config" in error_of(server.post(server_tools=True))["message"]
    assert server.post(server_tools=False).status_code == 200


def test_the_timeout_holds_for_all_rounds() -> None:
    async def look() -> str:
        raise ToolFailure("no result")

    server = Server(LOOK, "Blue.", look=look)
    server.post(timeout=50, priority=3)
    first, second = (one.options for one in server.client.requests)
    assert first.timeout_s == 50 and second.timeout_s is not None and second.timeout_s < 50
    assert first.priority == second.priority == 3
    ((_, _, timeout_s),) = server.tools.called
    assert timeout_s < 50

    async def sleep() -> str:
        await asyncio.sleep(0.3)
        return "late"

    late = Server(LOOK, "never", look=sleep)
    assert "timeout of 0.2 s" in error_of(late.post(timeout=0.2), 504)["message"]
    assert len(late.client.requests) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_the_tools(is_stream: bool) -> None:
    server = Server(LOOK, "never")

    async def look() -> str:
        begun.set()
        await asyncio.sleep(60)
        return "late"

    begun = asyncio.Event()
    server.tools.results["look"] = look

    async def work(http: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(http.post(CHAT, json={"messages": HELLO, "stream": is_stream}))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    server.run(work)
    assert server.tools.num_cancelled == 1 and len(server.client.requests) == 1


def test_an_error_of_a_later_round_ends_the_response() -> None:
    server = Server(LOOK, "never")

    async def look() -> str:
        server.client.pause_at, server.client.failure = 0, RuntimeError("a bug")
        return "blue"

    server.tools.results["look"] = look
    assert server.post().status_code == 500
    server.client.reset()
    server.client.texts = [LOOK, "never"]
    response = server.post(stream=True)
    data = [json.loads(one[6:]) for one in response.text.split("\n\n") if one.startswith("data: {")]
    assert data[-1]["error"]["message"] and data[-2]["choices"][0]["delta"]["server_tool_calls"][0]["result"] == "blue"


def test_the_log_has_no_arguments_and_no_results(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagewick"):
        Server('<call:look>{"at": "a secret"}</call>', "Done.", look="another secret").post()
    lines = [record.getMessage() for record in caplog.records]
    assert any("tool look gave 14 characters after" in line for line in lines)
    assert "secret" not in "".join(lines)
