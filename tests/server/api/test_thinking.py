"""Thoughts over HTTP: their fields in responses, and the many ways in which clients ask for them."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from pagewick.server.core.thinking import EFFORT_BUDGETS, ThinkingModel, warn_without_effect
from pagewick.server.settings import ServerSettings
from tests.fake_engine import END, TOKENIZER, FakeClient
from tests.log_lines import collected_lines
from tests.server.api_routes import Api, error_of

THOUGHT = "<think>\nIt is é.\n</think>\n\nFour 😀."
CLOSED = "<think>\n\n</think>\n\n"


class ThinkingClient(FakeClient):
    """Writes reasoning tags as single tokens."""

    def _token_ids(self, index: int) -> list[int]:
        return [*tokens(self.texts[index % len(self.texts)]), END]


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def thinking_api(**settings: Any) -> Api:
    api = Api(**settings)
    api.client = ThinkingClient()
    api.client.texts = [THOUGHT]
    return api


def budget_of(api: Api) -> int | None:
    constraint = api.client.requests[-1].constraint
    return None if constraint is None else constraint["budget"]


def test_thoughts_stand_apart_under_both_names() -> None:
    body = thinking_api().chat().json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "Four 😀.", "refusal": None,
        "reasoning_content": "It is é.", "reasoning": "It is é.",
    }  # fmt: skip
    num_thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(tokens("It is é.")) <= num_thought <= len(tokens("<think>\nIt is é.\n</think>\n\n"))
    assert body["usage"]["completion_tokens"] == len(tokens(THOUGHT)) + 1


def test_a_response_without_thoughts_has_neither_name() -> None:
    api = Api()
    assert sorted(api.chat().json()["choices"][0]["message"]) == ["content", "refusal", "role"]
    assert all("reasoning" not in str(event) for event in api.chat_events())


def test_streamed_thoughts_joined_equal_those_of_the_response() -> None:
    events = thinking_api().chat_events()
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(thoughts) == "It is é." and all(thoughts)
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == thoughts
    assert "".join(delta.get("content", "") for delta in deltas) == "Four 😀."
    assert all(set(delta) in ({"content"}, {"reasoning_content", "reasoning"}) for delta in deltas[1:-1])
    # No content before the last thought.
    kinds = ["content" in delta for delta in deltas[1:-1]]
    assert kinds == sorted(kinds)


def test_a_thought_without_an_end_leaves_the_content_empty() -> None:
    (choice,) = thinking_api().chat(max_tokens=len(tokens("<think>\nIt"))).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning"] == "It"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_can_be_left_out_or_left_in(stream: bool) -> None:
    def told(**fields: Any) -> tuple[str, bool]:
        if stream:
            deltas = [event["choices"][0]["delta"] for event in thinking_api().chat_events(**fields)]
            return "".join(delta.get("content", "") for delta in deltas), any("reasoning" in delta for delta in deltas)
        message = thinking_api().chat(**fields).json()["choices"][0]["message"]
        return message["content"], "reasoning" in message

    assert told(include_reasoning=False) == ("Four 😀.", False)
    assert told(reasoning_format="none") == (THOUGHT, False)
    assert told(reasoning_format="deepseek") == told(reasoning_format="auto") == ("Four 😀.", True)


def test_the_server_may_leave_thoughts_in_the_content() -> None:
    message = thinking_api(reasoning_parser="none").chat().json()["choices"][0]["message"]
    assert message["content"] == THOUGHT and "reasoning" not in message


def test_logprobs_are_those_of_the_content() -> None:
    body = thinking_api().chat(logprobs=True).json()
    spelled = b"".join(bytes(one["bytes"]) for one in body["choices"][0]["logprobs"]["content"])
    assert spelled.decode() == "Four 😀."
    events = thinking_api().chat_events(logprobs=True)
    positions = [one for event in events for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert positions == body["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("fields", "is_on"),
    [
        ({}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"thinking": False}, False),
        ({"thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "max"}, True),
        # The more particular word counts.
        ({"reasoning_effort": "high", "thinking": False}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": False, "chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_the_switch(fields: dict[str, Any], is_on: bool) -> None:
    api = thinking_api()
    response = api.chat(**fields)
    assert response.status_code == 200 and "x-pagewick-ignored" not in response.headers
    assert api.prompt.endswith("<|im_start|>assistant\n" + ("" if is_on else CLOSED))
    # Where the template can be told, no budget is needed.
    assert is_on or budget_of(api) is None


def test_the_server_decides_where_requests_do_not_say() -> None:
    api = thinking_api(thinking=False, thinking_budget=7)
    api.chat()
    assert api.prompt.endswith(CLOSED) and budget_of(api) is None
    api.chat(thinking=True)
    assert not api.prompt.endswith(CLOSED) and budget_of(api) == 7
    api.chat(thinking=True, thinking_budget=3)
    assert budget_of(api) == 3


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking_budget": 5}, 5),
        ({"thinking_token_budget": 5}, 5),
        ({"reasoning_budget": 0}, 0),
        ({"reasoning_budget": -1}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "medium"}, 4096),
        ({"reasoning_effort": "max"}, None),
        ({"reasoning_effort": "low", "thinking_budget": 2000}, 2000),
    ],
)
def test_the_budget(fields: dict[str, Any], budget: int | None) -> None:
    api = thinking_api()
    assert api.chat(**fields).status_code == 200
    assert budget_of(api) == budget


def test_more_effort_is_a_larger_budget() -> None:
    budgets = [EFFORT_BUDGETS[effort] for effort in ("minimal", "low", "medium", "high", "xhigh")]
    assert budgets == sorted(set(budgets))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": True, "enable_thinking": False}, "thinking"),
        ({"thinking_budget": 5, "reasoning_budget": 5}, "reasoning_budget"),
        ({"thinking_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": 2**31}, "thinking_budget"),
        ({"thinking_budget": "few"}, "thinking_budget"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": "yes"}, "thinking"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str) -> None:
    api = thinking_api()
    assert error_of(api.chat(**fields))["param"] == param
    assert not api.client.requests


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({"thinking_budget": 512}, {}, "512"),
        ({"thinking_budget": -1}, {"thinking_budget": 9}, "none"),
        ({"reasoning_effort": "low"}, {}, str(EFFORT_BUDGETS["low"])),
        ({}, {"thinking_budget": 9}, "9"),
        ({}, {}, "none"),
        ({"thinking": False, "thinking_budget": 512}, {}, "0"),
        ({"thinking": True}, {}, "none"),
        ({"thinking_budget": 512, "chat_template_kwargs": {"thinking_budget": 256}}, {}, "256"),
    ],
)
def test_a_template_may_read_the_budget(fields: dict[str, Any], settings: dict[str, Any], expected: str) -> None:
    """As that of Seed-OSS does, whose models are told how many tokens they have."""
    api = Api(trust_request_chat_template=True, **settings)
    template = "Budget: {{ thinking_budget if thinking_budget is defined else 'none' }}."
    assert api.chat(chat_template=template, **fields).status_code == 200
    assert f"Budget: {expected}." in api.prompt


def test_past_thoughts_reach_the_template_under_either_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        api = thinking_api()
        past = {"role": "assistant", "content": "4", name: "Add them."}
        assert api.chat(messages=[{"role": "user", "content": "2+2"}, past]).status_code == 200
        assert "<think>\nAdd them.\n</think>\n\n4" in api.prompt


def test_a_model_that_does_not_think_is_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewick.async_llm.AsyncEngine.reasoning_tags", None)
    monkeypatch.setattr("pagewick.async_llm.AsyncEngine.can_think_by_switch", False)
    api = Api()

    def ignored_by(response: httpx.Response) -> str | None:
        assert response.status_code == 200 and budget_of(api) is None
        ignored: str | None = response.headers.get("x-pagewick-ignored")
        return ignored

    assert ignored_by(api.chat(reasoning_effort="high")) == "reasoning_effort"
    assert ignored_by(api.chat(thinking=True, enable_thinking=True)) == "enable_thinking, thinking"
    # A request not to think has its effect, so it is not ignored.
    assert ignored_by(api.chat(reasoning_effort="none", thinking_budget=5)) is None


def test_variables_that_the_chat_template_never_reads_are_named() -> None:
    variables = {"chat_template_kwargs": {"color": 1, "thinking": True}}
    named = "chat_template_kwargs.color"
    assert Api().chat(**variables).headers["x-pagewick-ignored"] == named
    both = Api().chat(**variables, documents=[{"text": "Hi"}], shape=1).headers["x-pagewick-ignored"]
    assert both == f"shape, {named}, documents"
    assert Api().post("/v1/responses", input="Hi", **variables).headers["x-pagewick-ignored"] == named
    api = Api(trust_request_chat_template=True)
    response = api.chat(**variables, documents=[], chat_template="{{ color }}")
    assert "x-pagewick-ignored" not in response.headers and api.prompt == "1"


def test_a_model_without_a_switch_is_kept_from_thinking_by_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewick.async_llm.AsyncEngine.can_think_by_switch", False)
    api = thinking_api()
    assert api.chat(thinking=False).status_code == 200
    assert budget_of(api) == 0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ThinkingModel(True, True), []),
        (ThinkingModel(True, False), ["--thinking has no effect: this model thinks without being asked to"]),
        (
            ThinkingModel(False, False),
            [
                "--thinking has no effect: this model writes no thoughts between tags",
                "--thinking-budget has no effect: this model writes no thoughts between tags",
            ],
        ),
        (
            ThinkingModel(True, False, has_template=False),
            [
                "--thinking has no effect: this model has no chat template, so that no request is a chat",
                "--thinking-budget has no effect: this model has no chat template, so that no request is a chat",
            ],
        ),
    ],
)
def test_settings_about_thoughts_without_effect_are_logged(model: ThinkingModel, expected: list[str]) -> None:
    with collected_lines(logging.WARNING) as lines:
        warn_without_effect(ServerSettings(thinking=True, thinking_budget=100), model)
        warn_without_effect(ServerSettings(thinking=False), model)
        warn_without_effect(ServerSettings(), model)
    assert lines == expected
