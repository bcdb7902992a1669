"""The fields of a request that speak of thinking.

Clients say it in many ways. The most particular one counts: a variable of the template, then enable_thinking or
thinking, then reasoning_effort, then the server's own choice.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from msgspec import Struct

from pagewick.errors import InvalidRequestError
from pagewick.server.api.request_fields import one_of
from pagewick.server.core.request import Thinking
from pagewick.server.core.thinking import SWITCHES, ThinkingModel

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingOption(Struct):
    """thinking in the form of an object, as Anthropic, DeepSeek and GLM have it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class ThinkingRequest(Protocol):
    """Whether the model is to think."""

    enable_thinking: bool | None
    thinking: bool | ThinkingOption | None
    reasoning_effort: ReasoningEffort | None
    chat_template_kwargs: dict[str, Any] | None


class BudgetRequest(ThinkingRequest, Protocol):
    """Also for how long."""

    thinking_budget: int | None
    thinking_token_budget: int | None
    reasoning_budget: int | None


def thinking_of(request: ThinkingRequest) -> Thinking:
    """What a request says, without a budget. Raises InvalidRequestError for one that contradicts itself."""
    return Thinking(_is_wanted(request), request.reasoning_effort)


def thinking_with_budget(request: BudgetRequest) -> Thinking:
    """What a request says. Raises InvalidRequestError for one that contradicts itself, or has several budgets."""
    option = request.thinking.budget_tokens if isinstance(request.thinking, ThinkingOption) else None
    budget = one_of(
        thinking_token_budget=request.thinking_token_budget,
        thinking_budget=request.thinking_budget,
        reasoning_budget=request.reasoning_budget,
        **{"thinking.budget_tokens": option},
    )
    return Thinking(_is_wanted(request), request.reasoning_effort, budget)


def ignored_names(request: ThinkingRequest, model: ThinkingModel) -> list[str]:
    """The fields that ask a model to think that does not."""
    if model.has_thoughts or model.has_switch:
        return []
    wanted = {
        "enable_thinking": bool(request.enable_thinking),
        "thinking": bool(_by_thinking(request.thinking)),
        "reasoning_effort": request.reasoning_effort not in (None, "none"),
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _is_wanted(request: ThinkingRequest) -> bool | None:
    given = request.chat_template_kwargs or {}
    for name in SWITCHES:
        if isinstance(given.get(name), bool):
            return bool(given[name])
    by_thinking = _by_thinking(request.thinking)
    if None not in (by_thinking, request.enable_thinking) and by_thinking != request.enable_thinking:
        message = "thinking and enable_thinking contradict each other; give one of them"
        raise InvalidRequestError(message, param="thinking")
    for wanted in (request.enable_thinking, by_thinking):
        if wanted is not None:
            return wanted
    return None if request.reasoning_effort is None else request.reasoning_effort != "none"


def _by_thinking(thinking: bool | ThinkingOption | None) -> bool | None:
    if isinstance(thinking, ThinkingOption):
        return {"enabled": True, "disabled": False, "adaptive": None}[thinking.type]
    return thinking
