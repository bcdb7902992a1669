"""How long a model is to think, and the variables that tell its chat template."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from pagewick.async_llm import AsyncEngine
from pagewick.errors import InvalidRequestError
from pagewick.server.core.request import Thinking
from pagewick.server.settings import ServerSettings

_logger = logging.getLogger(__name__)

# Upper limits of tokens of thought. Any other effort has no limit.
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096, "high": 16384, "xhigh": 32768}
MAX_BUDGET = 2**31 - 1
NO_LIMIT = -1
# Names of the variable by which chat templates turn thoughts on and off.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class ThinkingModel:
    """has_thoughts: it writes them between known tags. has_switch: its template can turn them on and off.

    has_template: without one, no request can be a chat.
    """

    has_thoughts: bool
    has_switch: bool
    has_template: bool = True

    @classmethod
    def of(cls, engine: AsyncEngine) -> ThinkingModel:
        return cls(engine.reasoning_tags is not None, engine.can_think_by_switch, engine.has_chat_template)


def warn_without_effect(settings: ServerSettings, model: ThinkingModel) -> None:
    """Log a warning for each setting about thoughts that changes nothing with this model."""
    if not model.has_template and not settings.trust_request_chat_template:
        flags = (("--thinking", settings.thinking), ("--thinking-budget", settings.thinking_budget))
        for flag in (flag for flag, value in flags if value not in (None, False)):
            _logger.warning("%s has no effect: this model has no chat template, so that no request is a chat", flag)
        return
    if settings.thinking and not model.has_switch:
        how = "thinks without being asked to" if model.has_thoughts else "writes no thoughts between tags"
        _logger.warning("--thinking has no effect: this model %s", how)
    if settings.thinking_budget is not None and not model.has_thoughts:
        _logger.warning("--thinking-budget has no effect: this model writes no thoughts between tags")


def thinking_variables(thinking: Thinking, settings: ServerSettings) -> dict[str, Any]:
    """Return the request's wishes under all names that templates have for them."""
    wanted = _is_wanted(thinking, settings)
    variables: dict[str, Any] = {} if wanted is None else dict.fromkeys(SWITCHES, wanted)
    if thinking.effort not in (None, "none"):
        variables["reasoning_effort"] = thinking.effort
    limit = _limit_of(thinking, settings)
    if limit != NO_LIMIT and wanted is not False:
        variables["thinking_budget"] = limit
    return variables


def budget_of(thinking: Thinking, settings: ServerSettings, model: ThinkingModel) -> int | None:
    """Return the limit of tokens of thought; None is no limit. It is 0 if only a budget can keep a model from thinking.

    Raises InvalidRequestError for a budget out of range.
    """
    given = thinking.budget
    if given is not None and not NO_LIMIT <= given <= MAX_BUDGET:
        message = f"thinking_budget must be a number of tokens, or -1 for no limit; got {given}"
        raise InvalidRequestError(message, param="thinking_budget")
    if not model.has_thoughts:
        return None
    if _is_wanted(thinking, settings) is False:
        return None if model.has_switch else 0
    limit = _limit_of(thinking, settings)
    return None if limit == NO_LIMIT else limit


def _limit_of(thinking: Thinking, settings: ServerSettings) -> int:
    if thinking.budget is not None:
        return thinking.budget
    if thinking.effort is not None:
        return EFFORT_BUDGETS.get(thinking.effort, NO_LIMIT)
    return NO_LIMIT if settings.thinking_budget is None else settings.thinking_budget


def _is_wanted(thinking: Thinking, settings: ServerSettings) -> bool | None:
    """None leaves it to the model."""
    return settings.thinking if thinking.is_wanted is None else thinking.is_wanted
