"""One core, two dialects: the same request gives the same parts in both."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from pagewick.engine.messages import RequestOptions
from pagewick.errors import EngineError
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.text import request_maker
from pagewick.text.thinking_budget import ThinkingBudget
from tests.fake_engine import END, TOKENIZER, FakeClient
from tests.server.api.other_dialect import TALK, Served
from tests.server.api_routes import CHAT, HELLO, events_of

SAID = '<think>\nOne é.\n</think>\n\nSo:<call:add>{"a": 1}</call> and <call:sub>{}</call><no>No more 😀</no>.'
PARTS: list[dict[str, Any]] = [
    {"kind": "reasoning", "text": "One é."},
    {"kind": "text", "text": "So:"},
    {"kind": "tool_call", "text": '{"a": 1}', "gadget": "add", "number": 0},
    {"kind": "text", "text": " and "},
    {"kind": "tool_call", "text": "{}", "gadget": "sub", "number": 1},
    {"kind": "refusal", "text": "No more 😀"},
    {"kind": "text", "text": "."},
]  # fmt: skip
CALLS = [
    {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "call_1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
]


class Writer(FakeClient):
    """Writes reasoning tags as single tokens."""

    def _token_ids(self, index: int) -> list[int]:
        return [*TOKENIZER.encode(self.texts[index % len(self.texts)], add_special_tokens=False), END]


def served(text: str = SAID, **options: Any) -> Served:
    server = Served(**options)
    server.client = Writer()
    server.client.texts = [text]
    return server


def joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring pieces that differ only in their text."""
    whole: list[dict[str, Any]] = []
    for piece in pieces:
        if whole and {**whole[-1], "text": ""} == {**piece, "text": ""}:
            whole[-1]["text"] += piece["text"]
        else:
            whole.append(dict(piece))
    return whole


def test_every_kind_of_part_comes_in_order_at_once_and_piece_by_piece() -> None:
    assert served().talk().json() == {"parts": PARTS, "why": "stop"}
    events = served().live()
    assert [name for name, _ in events if name != "more"] == ["begin", "end"]
    assert events[0][0] == "begin" and events[-1] == ("end", {"why": "stop"})
    assert joined([data for name, data in events if name == "more"]) == PARTS
    assert len(events) > 2 * len(PARTS)


def test_a_stream_ends_as_its_dialect_has_it() -> None:
    assert "[DONE]" not in served().talk(live=True).text
    assert served().post(CHAT, messages=HELLO, stream=True).text.endswith("data: [DONE]\n\n")


def test_openai_names_the_same_parts() -> None:
    body = served().post(CHAT, messages=HELLO).json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "So: and .", "refusal": "No more 😀", "tool_calls": CALLS,
        "reasoning": "One é.", "reasoning_content": "One é.",
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    # As the official client reads it.
    message = ChatCompletion.model_validate(body).choices[0].message
    assert message.tool_calls is not None and message.tool_calls[1].id == "call_1"
    num_thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_thought <= len(TOKENIZER.encode("<think>\nOne é.\n</think>\n\n", add_special_tokens=False))


def test_openai_streams_the_same_parts() -> None:
    events = events_of(served().post(CHAT, messages=HELLO, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if call["index"] not in calls:
                calls[call.pop("index")] = call
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert calls == dict(enumerate(CALLS))
    for name, text in (("content", "So: and ."), ("refusal", "No more 😀"), ("reasoning", "One é.")):
        assert "".join(delta.get(name, "") for delta in deltas) == text
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_truncated_response_with_calls_has_the_finish_reason_length() -> None:
    for stream in (False, True):
        response = served().post(CHAT, messages=HELLO, stream=stream, max_tokens=60)
        last = events_of(response)[-1] if stream else response.json()
        assert last["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_are_those_of_the_text() -> None:
    body = served().post(CHAT, messages=HELLO, logprobs=True).json()
    spelled = b"".join(bytes(one["bytes"]) for one in body["choices"][0]["logprobs"]["content"]).decode()
    assert "add" not in spelled and "more" not in spelled and "One" not in spelled and " and " in spelled


def test_tools_reach_the_prompt_and_the_format() -> None:
    server = served()
    assert server.talk(gadgets=["add", "sub"]).status_code == 200
    assert server.format.num_tools == 2
    prompt = TOKENIZER.decode(server.client.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert '"name": "add"' in prompt
    assert served().talk(live=True).status_code == 200


def test_completions_are_not_split() -> None:
    body = served().post("/v1/completions", prompt="x", max_tokens=99).json()
    assert body["choices"][0]["text"] == SAID


@pytest.mark.parametrize(
    ("fields", "where", "what"),
    [
        ({"lines": []}, "lines", "say something"),
        ({"at_most": "few"}, "at_most", "expected an integer"),
        ({"magic": True}, "magic", "magic is not supported"),
        # The core's word, with the dialect's name of the field.
        ({"warmth": -1.0}, "warmth", "warmth must be"),
        ({"shape": "(" * 999}, "shape", "shape cannot be honoured: it is nested deeper than 64 levels"),
        ({"at_most": 5000}, "at_most", "maximum context length"),
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_errors_have_the_dialects_own_form(fields: dict[str, Any], where: str, what: str, live: bool) -> None:
    server = served()
    response = server.talk(**{"live": live, **fields})
    assert response.status_code == 400
    error = response.json()["oops"]
    assert response.json().keys() == {"oops"}
    assert (error["where"], error["sort"]) == (where, "invalid_request_error") and what in error["what"]
    assert not server.client.requests


@pytest.mark.parametrize("path", [TALK, CHAT, "/v1/completions"])
def test_values_are_checked_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    check_options, check_budget = request_maker.check_options, ThinkingBudget.check

    def see_options(options: RequestOptions) -> None:
        checked.append(options)
        check_options(options)

    def see_budget(maker: ThinkingBudget, budget: int, params: SamplingParams) -> None:
        checked.append(budget)
        check_budget(maker, budget, params)

    monkeypatch.setattr(request_maker, "check_options", see_options)
    monkeypatch.setattr(ThinkingBudget, "check", see_budget)
    asked: dict[str, Any] = {
        TALK: {"lines": [{"who": "user", "what": "hi"}]},
        CHAT: {"messages": HELLO},
        "/v1/completions": {"prompt": "hi"},
    }[path]
    budget = {"thinking_budget": 7} if path == CHAT else {}
    assert served().post(path, cache_salt="s", **asked, **budget).status_code == 200
    salt = None if path == TALK else "s"
    assert checked == [RequestOptions(cache_salt=salt), *budget.values()]


def test_a_model_without_a_format_has_no_tools() -> None:
    server = served(has_format=False)
    response = server.talk(gadgets=["add"])
    assert response.status_code == 400 and response.json()["oops"]["where"] == "gadgets"
    assert server.talk().json()["parts"][1]["text"].startswith("So:<call:add>")


def test_a_failure_within_a_stream_is_an_event_of_the_dialect() -> None:
    server = served()
    server.client.pause_at, server.client.failure = 3, EngineError("it broke")
    *before, last = server.live()
    assert before[0][0] == "begin"
    assert last == ("oops", {"oops": {"what": "it broke", "where": None, "sort": "server_error"}})
    server = served()
    server.client.pause_at, server.client.failure = 3, EngineError("it broke")
    response = server.talk()
    assert response.status_code == 500 and response.json()["oops"]["what"] == "it broke"


def test_internal_errors_have_the_dialects_form_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("not to be shown")

    monkeypatch.setattr("tests.server.api.other_dialect.TalkRequest.chat_request", fail)
    response = served().talk()
    assert response.status_code == 500 and response.json()["oops"]["sort"] == "server_error"
    assert "not to be shown" not in response.text


def test_a_conversation_goes_from_one_dialect_to_the_other() -> None:
    server = served(SAID.replace("\n", ""))

    async def talk(http: httpx.AsyncClient) -> Any:
        lines = [{"who": "user", "what": "hi"}]
        assert (await http.post(TALK, json={"lines": lines, "memory": "m"})).status_code == 200
        return (await http.get("/v1/sessions/m")).json()["messages"]

    assert server.run(talk) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": "So: and .", "reasoning_content": "One é.", "refusal": "No more 😀",
            "tool_calls": CALLS,
        },
    ]  # fmt: skip


def test_the_log_tells_parts_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert served(log_prompts=True).talk().status_code == 200
    lines = [
        record.getMessage().split(" ", 2)[2] for record in caplog.records if record.getMessage().startswith("request ")
    ]
    said = [line for line in lines if line.split()[0] in ("thoughts", "answer", "tool", "refusal")]
    assert said == [
        "thoughts 0: 'One é.'", "answer 0: 'So:'", "tool call 0: 'add {\"a\": 1}'", "answer 0: ' and '",
        "tool call 0: 'sub {}'", "refusal 0: 'No more 😀'", "answer 0: '.'",
    ]  # fmt: skip


def test_unknown_fields_are_named_and_metrics_count_every_dialect() -> None:
    server = served()

    async def talk(http: httpx.AsyncClient) -> tuple[httpx.Response, str]:
        body = {"lines": [{"who": "user", "what": "hi"}], "colour": 1}
        return await http.post(TALK, json=body), (await http.get("/metrics")).text

    response, metrics = server.run(talk)
    assert response.headers["x-pagewick-ignored"] == "colour"
    assert any(TALK in line and " 1.0" in line for line in metrics.splitlines())


def test_kinds_say_what_holds_for_them() -> None:
    assert [kind.value for kind in PartKind if kind.is_reasoning] == ["reasoning"]
    assert [kind.value for kind in PartKind if kind.has_logprobs] == ["text"]
    assert [kind.value for kind in PartKind if not kind.has_stop_strings] == ["tool_call"]
