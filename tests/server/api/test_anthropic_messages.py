"""Anthropic's Messages API: what requests become, and how responses, events and errors are written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from pagewick.errors import EngineError
from pagewick.server.api.anthropic.dialect import AnthropicApi
from pagewick.server.api.openai import OpenAIApi
from pagewick.server.api.partial_json import read_input
from pagewick.server.app import ErrorBoundary, build_app, with_access_control
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.lifecycle import Lifecycle, loading
from pagewick.server.settings import ServerSettings
from tests.fake_engine import DEATH, MAX_MODEL_LEN, TOKENIZER, FakeClient, fake_engine
from tests.server.api.other_dialect import Served
from tests.server.api.test_chat_core import Writer
from tests.server.api.test_disconnect import send_and_leave
from tests.server.conftest import Server

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
SAID = '<think>\nOne é.\n</think>\n\nSo:<call:add>{"a": 1}</call> and <call:sub>{}</call>'
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "One é.", "signature": "unsigned"},
    {"type": "text", "text": "So:"},
    {"type": "tool_use", "id": "call_0", "name": "add", "input": {"a": 1}},
    {"type": "text", "text": " and "},
    {"type": "tool_use", "id": "call_1", "name": "sub", "input": {}},
]
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}


class Api(Served):
    """A server with OpenAI's and Anthropic's API, over a model that writes parts in the fake format."""

    dialects = (OpenAIApi, AnthropicApi)

    def __init__(self, *texts: str, **options: Any) -> None:
        super().__init__(**options)
        self.client = Writer()
        self.client.texts = texts or ("Hello 😀!",)

    def ask(self, **fields: Any) -> httpx.Response:
        return self.post(MESSAGES, **{"messages": HELLO, "max_tokens": 400, **fields})

    def message(self, **fields: Any) -> dict[str, Any]:
        response = self.ask(**fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def events(self, **fields: Any) -> list[tuple[str, Any]]:
        return events_of(self.ask(stream=True, **fields))

    def prompt(self, **fields: Any) -> str:
        """The text of the prompt that the request becomes."""
        self.message(**fields)
        return decoded(self.client)


def decoded(client: FakeClient) -> str:
    """The text of the latest request's prompt."""
    return TOKENIZER.decode(client.requests[-1].prompt_token_ids, skip_special_tokens=False)


def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def error_of(response: httpx.Response, status: int = 400) -> tuple[str, str]:
    """Return type and message of an error, after a check of its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert sorted(body) == ["error", "request_id", "type"] and body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert sorted(body["error"]) == ["message", "type"]
    return body["error"]["type"], body["error"]["message"]


def test_parts_are_blocks_in_order() -> None:
    body = Api(SAID).message(tools=[ADD])
    assert body.pop("id").startswith("msg_")
    usage = body.pop("usage")
    assert body == {
        "type": "message", "role": "assistant", "model": "org/fake-model", "content": BLOCKS,
        "stop_reason": "tool_use", "stop_sequence": None,
    }  # fmt: skip
    assert usage["output_tokens"] == len(TOKENIZER.encode(SAID, add_special_tokens=False)) + 1
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


def test_events_have_the_order_of_anthropics_server_and_make_the_same_message() -> None:
    events = Api(SAID).events(tools=[ADD])
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    names = [name for name, _ in events]
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert names[-2:] == ["message_delta", "message_stop"] and names.count("ping") == 1
    start, end = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 1
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == Api(SAID).message(tools=[ADD])["usage"]
    assert assembled(events) == BLOCKS


def assembled(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Put blocks together as a client does; a block must have ended when the next one begins."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for name, data in events:
        if name == "content_block_start":
            assert not is_open and data["index"] == len(blocks)
            block = data["content_block"]
            assert block.get("text", block.get("thinking", "")) == "" and block.get("input", {}) == {}
            blocks.append({**block, "json": ""} if block["type"] == "tool_use" else dict(block))
            is_open = True
        elif name == "content_block_delta":
            assert is_open and data["index"] == len(blocks) - 1
            kind, piece = data["delta"].values()
            field = {"input_json_delta": "json"}.get(kind, kind.removesuffix("_delta"))
            assert piece
            blocks[-1][field] += piece
        elif name == "content_block_stop":
            assert is_open and data["index"] == len(blocks) - 1
            is_open = False
            if "json" in blocks[-1]:
                blocks[-1]["input"] = json.loads(blocks[-1].pop("json"))
    return blocks


def test_thoughts_may_be_left_out() -> None:
    thinking = {"type": "enabled", "budget_tokens": 100, "display": "omitted"}
    assert Api(SAID).message(thinking=thinking)["content"][0] == {**BLOCKS[0], "thinking": ""}
    deltas = [data["delta"] for name, data in Api(SAID).events(thinking=thinking) if name == "content_block_delta"]
    assert deltas[0] == {"type": "signature_delta", "signature": "unsigned"}


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("Hi.", {}, "end_turn", None),
        ("Hi.", {"max_tokens": 1}, "max_tokens", None),
        ("one STOP two", {"stop_sequences": ["x", "STOP"]}, "stop_sequence", "STOP"),
        ("one STOP two", {"stop": "STOP"}, "stop_sequence", "STOP"),
        ("Hi.", {"stop_token_ids": TOKENIZER.encode(".", add_special_tokens=False)}, "end_turn", None),
        ("<no>I will not.</no>", {}, "refusal", None),
        ('<call:add>{"a": 1}</call>', {}, "tool_use", None),
    ],
)
def test_reasons_to_stop(text: str, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    body = Api(text).message(**fields)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert Api(text).events(**fields)[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_max_tokens_beyond_the_context_ends_the_response_when_that_is_full() -> None:
    api = Api("x " * MAX_MODEL_LEN)
    api.client.extras = {"finish_reason": "length"}
    assert api.message(max_tokens=100_000)["stop_reason"] == "model_context_window_exceeded"
    assert api.client.requests[0].options.lowers_max_tokens
    kind, message = error_of(api.ask(messages=[{"role": "user", "content": "x " * MAX_MODEL_LEN}]))
    assert kind == "invalid_request_error" and message.startswith("prompt is too long: ")


def test_cached_tokens_are_no_input_tokens() -> None:
    api = Api()
    api.client.extras = {"num_cached_tokens": 5}
    usage = api.message()["usage"]
    count = api.post(COUNT, messages=HELLO).json()
    assert usage["cache_read_input_tokens"] == 5 and usage["cache_creation_input_tokens"] == 0
    assert count == {"input_tokens": usage["input_tokens"] + 5}
    start = api.events()[0][1]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (usage["input_tokens"], 5)


def test_the_same_body_may_be_counted() -> None:
    body = {
        "system": [{"type": "text", "text": "Be brief."}], "messages": HELLO, "tools": [ADD], "stream": True,
        "max_tokens": 7, "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
    }  # fmt: skip
    api = Api(has_own_format=True)
    count = api.post(COUNT, **body).json()["input_tokens"]
    assert api.client.requests == []
    api.post(MESSAGES, **body)
    assert count == len(api.client.requests[0].prompt_token_ids)
    assert count > api.post(COUNT, messages=HELLO).json()["input_tokens"]


def test_a_conversation_becomes_that_of_a_chat() -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "abc"}, {"type": "text", "text": "So:"}, CALL,
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "é"}]},
            {"type": "text", "text": "Three"},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    api = Api()
    given = api.prompt(system=system, messages=messages, tools=[ADD])
    parts = [{"type": "text", "text": text} for text in ("Be brief.", "Be kind.", "One", "Two")]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat: list[Any] = [
        {"role": "system", "content": parts[:2]},
        {"role": "user", "content": parts[2:]},
        {"role": "assistant", "content": "So:", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "é"},
        {"role": "user", "content": "Three"},
    ]
    function = {"name": "add", "description": "Add.", "parameters": ADD["input_schema"]}
    api.post("/v1/chat/completions", messages=chat, tools=[{"type": "function", "function": function}])
    assert given == decoded(api.client)


WRITTEN = "[{{ m.role }}]{{ m.content }}"
TEMPLATES = {
    "written": WRITTEN,
    "refused": "{% if m.role == 'system' and not loop.first %}{{ raise_exception('not here') }}{% endif %}" + WRITTEN,
    "left out": "{% if m.role != 'system' or loop.first %}" + WRITTEN + "{% endif %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_instructions_in_the_middle_reach_every_model(kind: str) -> None:
    api = Api(template="{% for m in messages %}" + TEMPLATES[kind] + "{% endfor %}")
    messages = [{"role": role, "content": role} for role in ("system", "user", "system", "assistant", "user")]
    late = "[system]system" if kind == "written" else "\n<system-reminder>\nsystem\n</system-reminder>"
    for _ in range(2):
        assert api.prompt(messages=messages) == f"[system]system[user]user{late}[assistant]assistant[user]user"


def test_the_assistants_last_message_is_continued() -> None:
    beginning = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    assert Api().prompt(messages=beginning).endswith("The answer is")
    assert Api().prompt(messages=[*HELLO, {"role": "assistant", "content": ""}]) == Api().prompt()


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "no such file", "is_error": True}, "Error:\nno such file"),
        ({"content": "Error: no such file", "is_error": True}, "Error: no such file"),
        ({"is_error": True}, "Error:"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({}, ""),
    ],
)
def test_a_failed_tool_says_so(result: dict[str, Any], shown: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", **result}
    messages = [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]}]
    assert f"<tool_response>\n{shown}\n</tool_response>" in Api().prompt(messages=messages)


@pytest.mark.parametrize("system", [str, lambda text: [{"type": "text", "text": one} for one in text.split("\n")]])
def test_the_first_block_of_claude_code_is_no_part_of_the_prompt(system: Any) -> None:
    api = Api()
    header = "x-anthropic-billing-header: cc_version=2.1.0; cch=1a2b3;\nBe brief."
    response = api.ask(system=system(header))
    assert response.headers["x-pagewick-ignored"] in ("system", "system[0]")
    assert "x-pagewick-ignored" not in api.ask(system="Be brief.").headers
    with_header, without = api.client.requests
    assert with_header.prompt_token_ids == without.prompt_token_ids


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
    ids=str,
)
def test_choices_of_tools_are_those_of_a_chat(choice: dict[str, Any], fields: dict[str, Any]) -> None:
    api = Api('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', has_own_format=True)
    sub = {**ADD, "name": "sub"}
    body = api.message(tools=[ADD, sub], tool_choice=choice)
    assert (body["stop_reason"] == "tool_use") == (choice["type"] != "none")
    functions = [{"name": one["name"], "description": "Add.", "parameters": ADD["input_schema"]} for one in (ADD, sub)]
    tools = [{"type": "function", "function": function} for function in functions]
    api.post("/v1/chat/completions", messages=HELLO, tools=tools, **fields)
    ours, theirs = api.client.requests
    assert (ours.prompt_token_ids, ours.constraint) == (theirs.prompt_token_ids, theirs.constraint)


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, 1024),
        ({"type": "enabled"}, None),
        ({"type": "adaptive"}, None),
        ({"type": "disabled"}, None),
    ],
)
def test_thinking(thinking: dict[str, Any], budget: int | None) -> None:
    api = Api(has_own_format=True)
    prompt = api.prompt(thinking=thinking)
    constraint = api.client.requests[-1].constraint
    assert (constraint and constraint["budget"]) == budget
    assert prompt.endswith("</think>\n\n") == (thinking["type"] == "disabled")


def test_effort_limits_thoughts() -> None:
    api = Api(has_own_format=True)
    api.message(output_config={"effort": "low"})
    assert api.client.requests[-1].constraint["budget"] == 1024


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_the_form_of_the_text(fields: dict[str, Any]) -> None:
    api = Api(has_own_format=True)
    api.message(**fields)
    assert api.client.requests[-1].constraint is not None


def test_fields_of_other_routes_hold_here_too() -> None:
    api = Api()
    response = api.ask(temperature=0.5, top_k=7, min_p=0.1, seed=3, priority=2, metadata={"user_id": "x"},
                       service_tier="auto", cache_control={"type": "ephemeral"})  # fmt: skip
    assert "x-pagewick-ignored" not in response.headers
    request = api.client.requests[-1]
    assert (request.params.temperature, request.params.top_k, request.params.seed) == (0.5, 7, 3)
    assert request.options.priority == 2


UNKNOWN: dict[str, Any] = {
    "context_management": {"edits": []},
    "tools": [{**ADD, "defer_loading": True, "cache_control": {"type": "ephemeral"}}],
    "system": [{"type": "text", "text": "x", "colour": 1}],
    "messages": [
        {"role": "user", "content": "hi", "mood": "good"},
        {"role": "assistant", "content": [{**CALL, "more": 1, "caller": {"type": "direct"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [
            {"type": "text", "text": "x", "size": 1}]}]},
    ],
}  # fmt: skip


def test_unknown_fields_are_named_and_a_strict_server_refuses_them() -> None:
    assert Api().ask(**UNKNOWN).headers["x-pagewick-ignored"].split(", ") == [
        "context_management", "tools[].defer_loading", "system[].colour", "messages[].mood",
        "messages[].content[].more", "messages[].content[].content[].size",
    ]  # fmt: skip
    kind, message = error_of(Api(strict=True).ask(**UNKNOWN))
    assert kind == "invalid_request_error" and "context_management" in message and "defer_loading" in message


def test_thoughts_that_nobody_can_read_are_named() -> None:
    secret = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "xyz"}, *BLOCKS[1:2]]}
    response = Api().ask(messages=[*HELLO, secret, *HELLO])
    assert response.headers["x-pagewick-ignored"] == "messages[].content[].data"


def result(tool_use_id: str = "toolu_1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": "x"}


def after_call(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [*blocks]}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages must have 1 to 2048 entries"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "accepted: assistant, system, user"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only; messages"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "has type 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
         "messages[0].content[0].type: Invalid value 'search_result'; accepted: text, thinking, redacted_thinking, "
         "tool_use, tool_result"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0] has type 'tool_use', which"),
        ({"messages": [{"role": "user", "content": [result()]}]}, "messages[0].content[0].tool_use_id 'toolu_1'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages[1] has tool_use blocks; send"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL, CALL]}]}, "messages[1].content[1].id 'toolu_1'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": BLOCKS[:1]}]}, "messages[1] has thoughts only"),
        (after_call({"type": "text", "text": "x"}, result()), "messages[2].content[1] is a tool_result after a text"),
        (after_call(result(), result()), "no result yet; these are: none"),
        (after_call(result("toolu_2")), "no result yet; these are: 'toolu_1'"),
        (after_call({**result(), "content": [{"type": "image"}]}), "[2].content[0].content[0] has type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type 'web_search_20250305' is"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ({"tools": [{**ADD, "name": "two words"}]}, "tools[0].name must be"),
        ({"tools": [{**ADD, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type must be 'object'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice needs a name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice names 'sub'"),
        ({"stop_sequences": ["x"], "stop": "y"}, "stop is another name of stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n must be 1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not a field of this route"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: Invalid enum value 'between_tools'; accepted"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens must be"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported here; leave it out"),
        ({"container": "x"}, "container is not supported here; leave it out"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_requests(fields: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        kind, message = error_of(Api(has_own_format=True).ask(stream=stream, **fields))
        assert kind == "invalid_request_error" and words in message


def test_a_client_that_asks_for_a_thread_can_go_on_without() -> None:
    response = Api().ask(thread={"type": "create"})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "type": "invalid_request_error", "message": "thread is not supported here; leave it out",
        "details": {"error_code": "thread_unsupported_request"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "status", "kind"), [(EngineError("no number"), 500, "api_error"), (DEATH, 529, "overloaded_error")]
)
def test_an_error_of_the_engine(failure: Exception, status: int, kind: str) -> None:
    api = Api()
    api.client.pause_at, api.client.failure = 0, failure
    response = api.ask()
    assert error_of(response, status)[0] == kind
    assert ("retry-after" in response.headers) == (status == 529)
    api.client.pause_at = 3
    events = api.events()
    assert events[0][0] == "message_start" and events[-1][0] == "error"
    assert sorted(events[-1][1]) == ["error", "type"] and events[-1][1]["error"]["type"] == kind


def test_pings_are_events() -> None:
    api = Api(sse_keep_alive_interval=0.01)
    api.client.pause_at = 2

    async def work(http: httpx.AsyncClient) -> httpx.Response:
        asking = asyncio.create_task(
            http.post(MESSAGES, json={"messages": HELLO, "max_tokens": 400, "stream": True}, timeout=None)
        )
        await asyncio.sleep(0.2)
        api.client.go_on()
        return await asking

    events = events_of(api.run(work))
    assert events.count(("ping", {"type": "ping"})) > 2
    assert assembled(events) == [{"type": "text", "text": "Hello 😀!"}]


def refusals(settings: ServerSettings, **options: Any) -> Any:
    """Return a function that posts to a server with these settings, which refuses requests before they are read."""
    client = FakeClient()
    app = build_app(fake_engine(client), settings, **options)
    return poster(app)


def poster(app: Any) -> Any:
    async def post(path: str, method: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, headers=headers, content=body)

    return lambda path=MESSAGES, method="POST", headers={}, body=b"{}": asyncio.run(post(path, method, headers, body))


def test_refusals_before_the_body_is_read_have_anthropics_form() -> None:
    settings = ServerSettings(served_model_name=("m",), api_key=("a-long-test-key",), max_body_size=100)
    post = refusals(settings)
    key = {"x-api-key": "a-long-test-key"}
    assert error_of(post(), 401)[0] == "authentication_error"
    assert error_of(post(headers={"authorization": "Bearer wrong"}), 401)[0] == "authentication_error"
    assert error_of(post(headers={"origin": "http://evil.example"}), 403)[0] == "permission_error"
    assert error_of(post(headers=key, body=b"x" * 101), 413)[0] == "request_too_large"
    assert error_of(post(headers={"authorization": "Bearer a-long-test-key"}, body=b"{"))[0] == "invalid_request_error"
    wrong_method = post(method="GET", headers=key)
    assert error_of(wrong_method, 405)[0] == "invalid_request_error" and wrong_method.headers["allow"] == "POST"
    assert error_of(post(f"{MESSAGES}/nothing", headers=key), 404)[0] == "not_found_error"
    assert "pagewick complete --batch" in error_of(post(f"{MESSAGES}/batches", headers=key), 404)[1]
    unknown = post(headers=key, body=b'{"model": "x", "max_tokens": 1, "messages": []}')
    assert error_of(unknown, 400)[1].startswith("messages")
    # Neighbours of the path are not Anthropic's.
    for path in ("/v1/messagesx", "/v1/models"):
        assert post(path).json()["error"]["code"] == "invalid_api_key" and "request-id" not in post(path).headers


def test_a_server_that_cannot_serve_now_is_overloaded() -> None:
    lifecycle = Lifecycle()
    settings = ServerSettings(served_model_name=("m",))
    post = refusals(settings, lifecycle=lifecycle)
    lifecycle.drain()
    response = post()
    assert error_of(response, 529)[0] == "overloaded_error" and response.headers["retry-after"] == "5"
    assert post("/v1/chat/completions").status_code == 503
    post = poster(ErrorBoundary(with_access_control(loading, settings, ApiKeys(settings))))
    assert error_of(post(), 529)[0] == "overloaded_error"
    assert post("/v1/chat/completions").json()["error"]["code"] == "loading"


def test_overload() -> None:
    client = FakeClient()
    client.stats.num_requests_waiting = 9
    app = build_app(fake_engine(client), ServerSettings(served_model_name=("m",)), max_waiting_requests=1)
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    response = poster(app)(body=body)
    assert error_of(response, 429)[0] == "rate_limit_error" and response.headers["retry-after"] == "1"
    # Tokens are counted without the engine.
    assert poster(app)(COUNT, body=body).status_code == 200


def test_refusals_are_counted_by_their_cause() -> None:
    lifecycle = Lifecycle()
    client = FakeClient()
    app = build_app(fake_engine(client), ServerSettings(served_model_name=("m",)), lifecycle)
    too_long = json.dumps({"messages": [{"role": "user", "content": "x " * 999}], "max_tokens": 1}).encode()
    assert poster(app)(body=too_long).status_code == 400
    lifecycle.drain()
    assert poster(app)().status_code == 529
    metrics = poster(app)("/metrics", "GET").text
    for reason in ("context_length", "draining"):
        assert f'pagewick:requests_refused_total{{model_name="m",reason="{reason}"}} 1.0' in metrics


def test_leaving_aborts_the_request(server: Server) -> None:
    server.engine_client.pause_at = 2
    for count, stream in enumerate((False, True), start=1):
        send_and_leave(server, {"messages": HELLO, "max_tokens": 9, "stream": stream}, MESSAGES)
        server.until(lambda count=count: len(server.engine_client.aborted) == count)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, "b": {"c": [1, "x,}"]}}', {"a": 1, "b": {"c": [1, "x,}"]}}),
        ('{"a": 1, "b": {"c": [1, "x,}", "cut o', {"a": 1, "b": {"c": [1, "x,}"]}}),
        ('{"a": "\\"", "b": 12', {"a": '"'}),
        ('{"a": [], "b"', {"a": []}),
        ('{"a": {"b": 1}', {"a": {"b": 1}}),
        ('{"a', {}),
        ("", {}),
        ("[1]", {}),
        ("}", {}),
    ],
)
def test_input_that_is_cut_off(text: str, value: dict[str, Any]) -> None:
    assert read_input(text) == value
