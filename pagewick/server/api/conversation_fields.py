"""The fields of a request that say how its conversation becomes a prompt, and whether the model is to think.

Clients say in many ways whether the model is to think. The most particular one counts: a variable of the template, then
enable_thinking or thinking, then reasoning_effort, then the server's own choice.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from msgspec import Struct

from pagewick.async_llm import AsyncEngine
from pagewick.errors import InvalidRequestError
from pagewick.server.api.request_fields import one_of
from pagewick.server.core.request import Template, Thinking
from pagewick.server.core.thinking import SWITCHES, ThinkingModel

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# The names under which vLLM and llama.cpp have a budget; not all requests have these fields.
_BUDGETS = ("thinking_token_budget", "thinking_budget", "reasoning_budget")


class ThinkingOption(Struct):
    """thinking in the form of an object, as Anthropic, DeepSeek and GLM have it.

    budget_tokens: upper limit of tokens of thought.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class ConversationRequest(Protocol):
    """A request with these fields, whose names are vLLM's.

    chat_template: a template that replaces the model's; the server must allow it.
    chat_template_kwargs, documents: variables of the chat template.
    add_generation_prompt: false leaves out the beginning of the assistant's message.
    continue_final_message: continue the last message instead of beginning a new one.
    enable_thinking, thinking: whether the model thinks before it answers.
    reasoning_effort: none: do not think; other values limit the tokens of thought.
    """

    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    enable_thinking: bool | None
    thinking: bool | ThinkingOption | None
    reasoning_effort: ReasoningEffort | None


def template_of(request: ConversationRequest) -> Template:
    return Template(
        source=request.chat_template,
        variables=request.chat_template_kwargs or {},
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
    )


def thinking_of(request: ConversationRequest) -> Thinking:
    """Raises InvalidRequestError for a request that contradicts itself, or has several budgets."""
    return Thinking(_is_wanted(request), request.reasoning_effort, one_of(**_budgets(request)))


def budget_name(request: ConversationRequest) -> str | None:
    """Return the name under which the request has a budget; None if it has none."""
    return next((name for name, budget in _budgets(request).items() if budget is not None), None)


def ignored_names(request: ConversationRequest, model: ThinkingModel) -> list[str]:
    """Return the fields that ask for thoughts, if the model has none."""
    if model.has_thoughts or model.has_switch:
        return []
    wanted = {
        "enable_thinking": bool(request.enable_thinking),
        "thinking": bool(_by_thinking(request.thinking)),
        "reasoning_effort": request.reasoning_effort not in (None, "none"),
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def unread_variables(template: Template, engine: AsyncEngine) -> list[str]:
    """Return the fields of variables that the model's chat template never reads."""
    if template.source is not None:
        return []
    read = engine.template_variables
    if engine.reasoning_tags is not None or engine.can_think_by_switch:
        # A template that reads neither gets them under its own name, or the model a budget of no tokens.
        read = read.union(SWITCHES)
    names = [f"chat_template_kwargs.{name}" for name in template.variables if name not in read]
    return names if "documents" in read or not template.documents else [*names, "documents"]


def _budgets(request: ConversationRequest) -> dict[str, int | None]:
    budgets: dict[str, int | None] = {name: getattr(request, name, None) for name in _BUDGETS}
    if isinstance(request.thinking, ThinkingOption):
        budgets["thinking.budget_tokens"] = request.thinking.budget_tokens
    return budgets


def _is_wanted(request: ConversationRequest) -> bool | None:
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
