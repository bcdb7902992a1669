"""Whether a model is to think before it answers, for how long, and who gets to read it.

Clients say it in many ways. The most particular one counts: a variable of the template, then enable_thinking or
thinking, then reasoning_effort, then the server's own choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from pagewick.errors import InvalidRequestError
from pagewick.server.api.request_fields import one_of
from pagewick.server.settings import ServerSettings

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Most tokens of thought; an effort that is not here has no limit.
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096, "high": 16384, "xhigh": 32768}
MAX_BUDGET = 2**31 - 1
NO_LIMIT = -1
# What chat templates call the switch.
SWITCHES = ("enable_thinking", "thinking")


class ThinkingOption(Struct):
    """thinking in the form of an object, as Anthropic, DeepSeek and GLM have it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class ThinkingRequest(Protocol):
    """The fields of a request that speak of thinking."""

    enable_thinking: bool | None
    thinking: bool | ThinkingOption | None
    reasoning_effort: ReasoningEffort | None
    chat_template_kwargs: dict[str, Any] | None


class BudgetRequest(ThinkingRequest, Protocol):
    """Also those that say for how long."""

    thinking_budget: int | None
    thinking_token_budget: int | None
    reasoning_budget: int | None


@dataclass(frozen=True, slots=True)
class Model:
    """has_thoughts: it writes them between tags that are known. has_switch: its template turns them on and off."""

    has_thoughts: bool
    has_switch: bool


def is_thinking_wanted(request: ThinkingRequest, settings: ServerSettings) -> bool | None:
    """None leaves it to the model. Raises InvalidRequestError for a request that contradicts itself."""
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
    if request.reasoning_effort is not None:
        return request.reasoning_effort != "none"
    return settings.thinking


def template_variables(request: ThinkingRequest, settings: ServerSettings) -> dict[str, Any]:
    """The variables of chat_template_kwargs, with what the request says of thinking under all names in use."""
    wanted = is_thinking_wanted(request, settings)
    variables: dict[str, Any] = {} if wanted is None else dict.fromkeys(SWITCHES, wanted)
    if request.reasoning_effort not in (None, "none"):
        variables["reasoning_effort"] = request.reasoning_effort
    return variables | (request.chat_template_kwargs or {})


def budget_of(request: BudgetRequest, settings: ServerSettings, model: Model) -> int | None:
    """Most tokens of thought; None is no limit. Where only a budget can keep the model from thinking it is 0.

    Raises InvalidRequestError for a budget out of range, or several.
    """
    option = request.thinking.budget_tokens if isinstance(request.thinking, ThinkingOption) else None
    given = one_of(
        thinking_token_budget=request.thinking_token_budget,
        thinking_budget=request.thinking_budget,
        reasoning_budget=request.reasoning_budget,
        **{"thinking.budget_tokens": option},
    )
    if given is not None and not NO_LIMIT <= given <= MAX_BUDGET:
        message = f"thinking_budget must be the most tokens of thought, or -1 for no limit; got {given}"
        raise InvalidRequestError(message, param="thinking_budget")
    if not model.has_thoughts:
        return None
    if is_thinking_wanted(request, settings) is False:
        return None if model.has_switch else 0
    if given is None and request.reasoning_effort is not None:
        given = EFFORT_BUDGETS.get(request.reasoning_effort, NO_LIMIT)
    if given is None:
        given = settings.thinking_budget
    return None if given == NO_LIMIT else given


def ignored_names(request: ThinkingRequest, model: Model) -> list[str]:
    """The fields that ask a model to think that does not."""
    if model.has_thoughts or model.has_switch:
        return []
    wanted = {
        "enable_thinking": bool(request.enable_thinking),
        "thinking": bool(_by_thinking(request.thinking)),
        "reasoning_effort": request.reasoning_effort not in (None, "none"),
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _by_thinking(thinking: bool | ThinkingOption | None) -> bool | None:
    if isinstance(thinking, ThinkingOption):
        return {"enabled": True, "disabled": False, "adaptive": None}[thinking.type]
    return thinking
